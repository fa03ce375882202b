//! The hooks that the edit put into the spec: `createRuntime` ties the share to the container that now exists,
//! `poststop` gives it back. Both get the container's state on standard input.

use std::collections::HashMap;
use std::fmt::Display;
use std::io::{self, Read};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use oci_spec::runtime::State;

use crate::config;
use crate::daemon::Daemon;
use crate::file;
use crate::kernel::{self, Process};
use crate::layout::{Layout, TOKEN_ANNOTATION};
use crate::ledger::{Container, Ledger};
use crate::origin::Origin;
use crate::share::Token;

/// The last check before the container's own program runs. Its failure is the container's: better no container than
/// one that has the whole GPU because the daemon ended a moment ago.
pub fn create_runtime() -> ExitCode {
    report("createRuntime", attach())
}

/// The container is gone. Where this fails, the share is reaped as soon as somebody needs it.
pub fn poststop() -> ExitCode {
    report("poststop", release())
}

fn attach() -> Result<()> {
    let (state, token) = read_state(io::stdin().lock())?;
    let layout = Layout::new(kernel::owner(), |name| std::env::var_os(name));
    // how a daemon would be started is no question any more
    Daemon::new(&layout, &config::Daemon::default()).check()?;
    let pid =
        state.pid().ok_or_else(|| anyhow!("the runtime gave the container {} no process id", state.id()))?;
    let process =
        Process::find(pid).with_context(|| format!("cannot look at the container's process {pid}"))?;
    let container = Container {
        id: state.id().clone(),
        bundle: state.bundle().clone(),
        process,
        cgroup: process.cgroup(),
        origin: Origin::of(state.annotations().as_ref().unwrap_or(&HashMap::new()), state.bundle()),
    };
    Ok(Ledger::new(&layout).open()?.attach(&token, container)?)
}

fn release() -> Result<()> {
    let (state, token) = read_state(io::stdin().lock())?;
    let layout = Layout::new(kernel::owner(), |name| std::env::var_os(name));
    Ledger::new(&layout).open()?.release(&token, Some(state.id()))?;
    Ok(())
}

/// The container's state, and the token that the edit left in its annotations.
fn read_state(input: impl Read) -> Result<(State, Token)> {
    let bytes = file::read_all(input).context("cannot read the container's state from standard input")?;
    let state: State = serde_json::from_slice(&bytes).context("the container's state is not understood")?;
    let token = state.annotations().as_ref().and_then(|annotations| annotations.get(TOKEN_ANNOTATION));
    let token = token.ok_or_else(|| anyhow!("the container {} carries no {TOKEN_ANNOTATION}", state.id()))?;
    let token = Token::try_from(token.clone())?;
    Ok((state, token))
}

/// Runtimes show a failed hook's standard error to their user.
fn report<E: Display>(stage: &str, outcome: Result<(), E>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oci-mps: {stage}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_states_of_runc_and_crun_are_understood() {
        let token = "0123456789abcdef0123456789abcdef";
        for status in ["creating", "created", "running", "stopped"] {
            let text = format!(
                r#"{{"ociVersion":"1.0.2-dev","id":"c1","status":"{status}","pid":7,"bundle":"/b",
                     "annotations":{{"{TOKEN_ANNOTATION}":"{token}"}},"unknown":1}}"#
            );
            let (state, found) = read_state(text.as_bytes()).unwrap();
            assert_eq!((state.id().as_str(), found.as_str()), ("c1", token));
        }
    }

    #[test]
    fn a_state_without_a_token_is_an_error_that_names_the_container() {
        let error = read_state(&br#"{"ociVersion":"1.0.2","id":"c1","status":"creating","bundle":"/b"}"#[..]);
        assert!(error.unwrap_err().to_string().contains("the container c1 carries no oci-mps/.token"));
        assert!(read_state(&b"{"[..]).is_err());
    }
}
