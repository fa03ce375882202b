//! `oci-mps`: the command line, and the hooks that engines call.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let command_line: Vec<OsString> = std::env::args_os().collect();
    oci_mps::entry::hook(&command_line).unwrap_or_else(oci_mps::cli::main)
}
