//! A containerd shim whose `runc` is `oci-mps-runtime`.

use std::process::ExitCode;

fn main() -> ExitCode {
    oci_mps::entry::shim::main()
}
