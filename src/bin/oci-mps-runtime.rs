//! An OCI runtime that gives a container its share of the GPU and then becomes the real runtime.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let command_line: Vec<OsString> = std::env::args_os().collect();
    oci_mps::entry::hook(&command_line).unwrap_or_else(oci_mps::entry::runtime::main)
}
