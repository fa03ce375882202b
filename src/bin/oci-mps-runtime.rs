//! An OCI runtime that gives a container its share of the GPU and then becomes the real runtime.

use std::process::ExitCode;

fn main() -> ExitCode {
    oci_mps::entry::runtime::main()
}
