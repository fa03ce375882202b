//! The programs around this one: which it is itself, which lie beside it, which it looks for and becomes.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::unistd::{AccessFlags, access};

use crate::inject::Programs;
use crate::kernel::{self, Process};
use crate::layout::SYSTEM_PATH;

/// This very program, whatever it was called by.
const SELF: &str = "/proc/self/exe";

/// A program of oci-mps that is not where it belongs.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// `/proc` does not say which program this is.
    #[error("cannot read /proc/self/exe: {0}; mount /proc")]
    Unknown(#[source] io::Error),
    /// Not installed together.
    #[error("{} is not there; install {name} beside {}", path.display(), beside.display())]
    Missing {
        /// Its name.
        name: &'static str,
        /// Where it should be.
        path: PathBuf,
        /// This program.
        beside: PathBuf,
    },
}

/// Those that a container's way needs.
///
/// # Errors
/// Where one of them does not lie beside the running program.
pub fn all() -> Result<Programs, ProgramError> {
    Ok(Programs { oci_mps: sibling("oci-mps")?, hooks: sibling("oci-mps-runtime")? })
}

/// The absolute path of the program of that name which was installed together with this one.
///
/// # Errors
/// Where there is none.
pub fn sibling(name: &'static str) -> Result<PathBuf, ProgramError> {
    let beside = this()?;
    let path = beside.with_file_name(name);
    if is_program(&path) { Ok(path) } else { Err(ProgramError::Missing { name, path, beside }) }
}

/// The absolute path of the running program, links resolved.
///
/// # Errors
/// Where `/proc` is not readable.
pub fn this() -> Result<PathBuf, ProgramError> {
    std::fs::read_link(SELF).map_err(ProgramError::Unknown)
}

/// Finds a program other than this one: a path (anything with a `/`) as it is, a name in `first`, in `PATH` and in the
/// [`SYSTEM_PATH`].
pub fn find(wanted: &Path, first: Option<&Path>, search: Option<&OsStr>) -> Option<PathBuf> {
    let usable = |path: &PathBuf| is_program(path) && !kernel::same_file(path, Path::new(SELF));
    if wanted.as_os_str().as_encoded_bytes().contains(&b'/') {
        return Some(wanted.to_owned()).filter(usable);
    }
    let listed = search.into_iter().chain([OsStr::new(SYSTEM_PATH)]).flat_map(env::split_paths);
    first
        .map(Path::to_owned)
        .into_iter()
        .chain(listed)
        // a relative entry would be looked up in a container's bundle, which is not the administrator's
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(wanted))
        .find(usable)
}

fn is_program(path: &Path) -> bool {
    path.is_file() && access(path, AccessFlags::X_OK).is_ok()
}

/// Whether this process became what it is by [`become_program`] with the same guard: through a copy of itself, or a
/// wrapper that leads back. A child of such a process is another process, and has not come back.
pub fn came_back(guard: &str) -> bool {
    identity().is_some_and(|identity| env::var_os(guard).is_some_and(|value| value == identity))
}

/// `pid:start time`; both survive exec, and together they name one process.
fn identity() -> Option<OsString> {
    let this = Process::this().ok()?;
    Some(OsString::from(format!("{}:{}", this.pid, this.started)))
}

/// Becomes `program`: same process, arguments, directory, descriptors and environment, but for the variable `guard`
/// and, where one is given, another `PATH`. Returns only where that fails.
pub fn become_program(
    program: &Path,
    arguments: &[OsString],
    guard: &str,
    search: Option<&OsStr>,
) -> io::Error {
    let mut command = Command::new(program);
    command.args(arguments);
    if let Some(identity) = identity() {
        command.env(guard, identity);
    }
    if let Some(search) = search {
        command.env("PATH", search);
    }
    // exec also gives SIGPIPE back its default, which Rust's start-up took
    command.exec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn directory_with(name: &str, mode: u32) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(name), "").unwrap();
        fs::set_permissions(directory.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
        directory
    }

    #[test]
    fn a_name_is_looked_up_in_order_and_only_programs_count() {
        let (document, program) = (directory_with("x-runc", 0o644), directory_with("x-runc", 0o755));
        let search = env::join_paths([document.path(), Path::new("."), program.path()]).unwrap();
        let wanted = Path::new("x-runc");
        assert_eq!(find(wanted, None, Some(&search)), Some(program.path().join("x-runc")));
        assert_eq!(find(wanted, None, Some(document.path().as_os_str())), None);
        assert_eq!(find(wanted, Some(program.path()), None), Some(program.path().join("x-runc")));
        assert_eq!(find(Path::new("sh"), None, None).unwrap().file_name(), Some(OsStr::new("sh")));
    }

    #[test]
    fn a_path_is_taken_as_it_is() {
        let program = directory_with("x-runc", 0o755);
        let path = program.path().join("x-runc");
        assert_eq!(find(&path, None, None), Some(path));
        assert_eq!(find(&program.path().join("other"), None, None), None);
        assert_eq!(find(program.path(), None, None), None, "a directory");
    }

    #[test]
    fn this_very_program_is_never_found_by_any_name() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("x-runc");
        symlink(this().unwrap(), &link).unwrap();
        assert_eq!(find(Path::new("x-runc"), Some(directory.path()), None), None);
        assert_eq!(find(&link, None, None), None);
    }

    #[test]
    fn what_was_not_installed_together_is_named() {
        let error = sibling("no-such-program").unwrap_err().to_string();
        assert!(error.contains("install no-such-program beside /"), "{error}");
    }
}
