//! `oci-mps`: the command line, and the hooks that engines call.

use std::process::ExitCode;

fn main() -> ExitCode {
    oci_mps::cli::main()
}
