//! Where engines come in: each program, and each hook, as the engine calls it.

pub mod lifecycle;
pub mod precreate;
pub mod programs;
pub mod report;
pub mod runtime;
pub mod shim;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

/// Runs the hook that the command line names, where it names one: `oci-mps hook STAGE`.
///
/// The hooks in a spec call the runtime's program by the name `oci-mps`. They stand on the path of a starting
/// container, and that program carries neither NVML nor a parser of commands for people.
pub fn hook(command_line: &[OsString]) -> Option<ExitCode> {
    let [program, hook, stage] = command_line else { return None };
    if Path::new(program).file_name() != Some(OsStr::new("oci-mps")) || hook != "hook" {
        return None;
    }
    Some(match stage.to_str() {
        Some("precreate") => precreate::run(),
        Some("createRuntime") => lifecycle::create_runtime(),
        Some("poststop") => lifecycle::poststop(),
        _ => {
            eprintln!(
                "oci-mps: unknown hook stage {}; known are precreate, createRuntime and poststop",
                stage.display()
            );
            ExitCode::from(2)
        }
    })
}
