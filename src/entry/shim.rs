//! `containerd-shim-mps-v2`: containerd's own shim, started so that the `runc` it finds is `oci-mps-runtime`.
//!
//! The real `containerd-shim-runc-v2` looks `runc` up in its `PATH`, and all that it starts inherits that `PATH`; so a
//! directory with a `runc` of ours in front is all it takes, in every version of containerd.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::programs::{self, ProgramError};
use super::report;
use crate::kernel;
use crate::layout::{Layout, SYSTEM_PATH};

/// The shim that does the work.
const REAL: &str = "containerd-shim-runc-v2";

/// Tells a shim that became itself.
const GUARD: &str = "OCI_MPS_SHIM_PID";

#[derive(Debug, thiserror::Error)]
enum ShimError {
    #[error(
        "{REAL} is not beside this program nor in PATH ({search}); it comes with containerd: install it there"
    )]
    NoShim { search: String },
    #[error("{REAL} leads back to containerd-shim-mps-v2; install the one that comes with containerd")]
    Loop,
    #[error("cannot make the link {}: {source}; the shim needs it to put oci-mps-runtime in runc's place", path.display())]
    Link { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("cannot start {}: {source}", program.display())]
    Start { program: PathBuf, source: io::Error },
}

/// Becomes containerd's shim.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let layout = Layout::new(kernel::owner(), |name| env::var_os(name));
    let error = replace(&layout, &arguments);
    report::to_stderr(&error);
    ExitCode::FAILURE
}

/// Returns only where it fails.
fn replace(layout: &Layout, arguments: &[OsString]) -> ShimError {
    if programs::came_back(GUARD) {
        return ShimError::Loop;
    }
    let search = env::var_os("PATH").unwrap_or_else(|| SYSTEM_PATH.into());
    let Some(program) = real(&search) else {
        return ShimError::NoShim { search: search.to_string_lossy().into_owned() };
    };
    if let Err(error) = place_runc(layout)
        && starts_something(arguments)
    {
        return error;
    }
    let search = in_front(&layout.shim_path(), &search);
    let source = programs::become_program(&program, arguments, GUARD, Some(&search));
    ShimError::Start { program, source }
}

fn real(search: &OsStr) -> Option<PathBuf> {
    let here = programs::this().ok();
    programs::find(Path::new(REAL), here.as_deref().and_then(Path::parent), Some(search))
}

/// Whether a container may come of it. Cleaning up and describing itself must work on a broken host too, and
/// containerd names what it wants last.
fn starts_something(arguments: &[OsString]) -> bool {
    let last = arguments.last().map(OsString::as_os_str);
    !["delete", "-info", "-v", "-h"].iter().any(|harmless| last == Some(OsStr::new(harmless)))
}

/// Makes the `runc` that the real shim will find.
fn place_runc(layout: &Layout) -> Result<(), ShimError> {
    let runtime = programs::sibling("oci-mps-runtime")?;
    let path = layout.shim_path().join("runc");
    link(&runtime, &path).map_err(|source| ShimError::Link { path, source })
}

/// Makes `path` a link to `target`, at once for everybody who looks.
fn link(target: &Path, path: &Path) -> io::Result<()> {
    if fs::read_link(path).is_ok_and(|old| old == target) {
        return Ok(());
    }
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    // a link cannot be made over another, but one can be renamed over it
    let beside = directory.join(format!(".runc-{}", std::process::id()));
    let _ = fs::remove_file(&beside);
    symlink(target, &beside)?;
    fs::rename(&beside, path).inspect_err(|_| {
        let _ = fs::remove_file(&beside);
    })
}

/// `PATH` with `directory` as its first entry.
fn in_front(directory: &Path, search: &OsStr) -> OsString {
    let mut front = directory.as_os_str().to_owned();
    if !search.is_empty() {
        front.push(":");
        front.push(search);
    }
    front
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_made_corrected_and_left_alone() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join("bin/runc");
        for target in ["/old/oci-mps-runtime", "/new/oci-mps-runtime", "/new/oci-mps-runtime"] {
            link(Path::new(target), &path).unwrap();
            assert_eq!(fs::read_link(&path).unwrap(), Path::new(target));
        }
        assert_eq!(fs::read_dir(state.path().join("bin")).unwrap().count(), 1, "nothing beside it");
    }

    #[test]
    fn a_link_that_cannot_be_made_leaves_nothing_beside_it() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join("bin/runc");
        fs::create_dir_all(path.join("in the way")).unwrap();
        link(Path::new("/oci-mps-runtime"), &path).unwrap_err();
        assert_eq!(fs::read_dir(state.path().join("bin")).unwrap().count(), 1);
    }

    #[test]
    fn only_what_cannot_start_a_container_is_harmless() {
        let starts =
            |line: &str| starts_something(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>());
        assert!(starts("-namespace default -id c1 -address /run/c.sock start"));
        assert!(starts("-namespace default -id delete start"));
        assert!(starts(""));
        assert!(!starts("-namespace default -id start -bundle /b delete"));
        assert!(!starts("-info"));
    }

    #[test]
    fn an_empty_path_gets_no_empty_entry() {
        assert_eq!(in_front(Path::new("/s/bin"), OsStr::new("")), "/s/bin");
        assert_eq!(in_front(Path::new("/s/bin"), OsStr::new("/a:/b")), "/s/bin:/a:/b");
    }
}
