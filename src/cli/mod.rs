//! The command line of `oci-mps`: one file a command.

mod explain;
mod gpus;
mod shares;
mod status;
mod table;
mod up;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::entry::programs;
use crate::inject::Setting;
use crate::kernel::{self, Process};
use crate::layout::Layout;

/// Containers that share a GPU through NVIDIA MPS, each with the share its annotations ask for.
#[derive(Debug, Parser)]
#[command(name = "oci-mps", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what would be changed in a container's config.json, without changing anything
    Explain {
        /// A bundle, or its config.json
        #[arg(value_name = "BUNDLE|config.json")]
        path: PathBuf,
        /// As JSON: the share, the edits and the document
        #[arg(long)]
        json: bool,
    },
    /// List the GPUs that can be shared
    Gpus {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// List who was promised what
    #[command(args_conflicts_with_subcommands = true)]
    Shares {
        #[command(subcommand)]
        change: Option<SharesChange>,
        /// As JSON (docs/shares.md)
        #[arg(long)]
        json: bool,
        /// Again and again, every so many seconds
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", require_equals = true,
              value_parser = clap::value_parser!(u64).range(1..=86_400))]
        watch: Option<u64>,
    },
    /// Say how the MPS control daemon is, and what it serves
    Status {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Start the MPS control daemon, before the first container would
    Up,
    /// End the MPS control daemon
    Down {
        /// Wait so long for CUDA processes to end by themselves
        #[arg(long, value_name = "SECONDS", default_value_t = 0)]
        wait: u64,
        /// End CUDA processes that still run
        #[arg(long)]
        force: bool,
    },
    /// Called by engines and runtimes, not by people
    #[command(hide = true)]
    Hook {
        /// precreate, createRuntime or poststop
        stage: String,
    },
}

#[derive(Debug, Subcommand)]
enum SharesChange {
    /// Give back a share that a container left behind; refused while the container runs
    Release {
        /// A container's id, the beginning of it, its name, or the token of the share
        #[arg(value_name = "ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        id: String,
    },
}

/// Runs what was asked for and says how it ended: 0 done, 1 refused or failed, 2 not understood.
pub fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Explain { path, json } => explain::run(&path, json),
        Command::Gpus { json } => gpus::run(json),
        Command::Shares { change: Some(SharesChange::Release { id }), .. } => shares::release(&id),
        Command::Shares { change: None, json, watch } => shares::run(json, watch.map(Duration::from_secs)),
        Command::Status { json } => status::run(json),
        Command::Up => up::up(),
        Command::Down { wait, force } => up::down(Duration::from_secs(wait), force),
        Command::Hook { stage } => {
            return crate::entry::hook(&["oci-mps".into(), "hook".into(), stage.into()])
                .unwrap_or(ExitCode::FAILURE);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oci-mps: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The paths of whoever calls.
fn layout() -> Layout {
    Layout::new(kernel::owner(), |name| std::env::var_os(name))
}

fn setting() -> anyhow::Result<Setting> {
    Ok(Setting {
        layout: layout(),
        programs: programs::all().map_err(|error| error.to_string()),
        holder: Process::this()?,
        lapses_after: None,
        spec: None,
    })
}
