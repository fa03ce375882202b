//! What the benches find on the machine that they run on.

use std::fs;
use std::path::PathBuf;

/// `MPS_CONTROL`, else what `tests/engines/prepare` unpacked, else the installed one.
pub(crate) fn control_program() -> PathBuf {
    let unpacked = || {
        let cache = std::env::var_os("OCI_MPS_ENGINES")
            .map(PathBuf::from)
            .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/oci-mps/engines")))?;
        let known = fs::read_to_string(cache.join("env")).ok()?;
        known.lines().find_map(|line| line.strip_prefix("MPS_CONTROL_550=").map(PathBuf::from))
    };
    std::env::var_os("MPS_CONTROL")
        .map(PathBuf::from)
        .or_else(unpacked)
        .unwrap_or("nvidia-cuda-mps-control".into())
}
