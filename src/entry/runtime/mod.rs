//! `oci-mps-runtime`: edits the spec of a container that asks for a share, then becomes the real runtime.
//!
//! What does not create a container, and what does not ask, goes straight through: nothing is parsed, locked or
//! changed on its way, and a broken configuration of ours is no obstacle to it.

pub mod args;

use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Deserialize;
use toml::de::DeTable;

use self::args::{Bundle, Call};
use super::programs::{self, ProgramError};
use super::report;
use crate::config::Runtime;
use crate::file;
use crate::inject::{self, Refused, Setting};
use crate::kernel::{self, Process};
use crate::layout::{Layout, SYSTEM_PATH};

/// Tells a runtime that became itself.
const GUARD: &str = "OCI_MPS_RUNTIME_PID";

#[derive(Debug, thiserror::Error)]
enum RuntimeError {
    #[error(
        "no OCI runtime is there: looked for {names} in PATH and {}; install one, or name it as `path` under [runtime] \
         in {}",
        SYSTEM_PATH,
        config.display()
    )]
    NoRuntime { names: String, config: PathBuf },
    #[error(
        "the real runtime leads back to oci-mps-runtime ({}); name another one as `path` under [runtime] in {}",
        this.display(),
        config.display()
    )]
    Loop { this: PathBuf, config: PathBuf },
    #[error(
        "cannot look into {}, which {source}, so nobody knows whether the container asks for a share of a GPU; put its \
         spec into a regular file",
        path.display()
    )]
    Unseen { path: PathBuf, source: io::Error },
    #[error("cannot tell which process creates the container: {0}; mount /proc")]
    Holder(#[source] io::Error),
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("cannot start {}: {source}", program.display())]
    Start { program: PathBuf, source: io::Error },
}

/// Does what the command line says, as the real runtime.
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let line = args::parse(&arguments);
    let layout = Layout::new(kernel::owner(), |name| env::var_os(name));
    let Err(error) = replace(&layout, &line.call, &arguments);
    report::to_log(&line.log, &error);
    ExitCode::FAILURE
}

/// Returns only where it fails.
fn replace(layout: &Layout, call: &Call, arguments: &[OsString]) -> Result<Infallible, RuntimeError> {
    let program = real(layout)?;
    if let Call::Create(bundle) | Call::Run(bundle) = call {
        edit(bundle, layout)?;
    }
    let search = env::var_os("PATH").and_then(|search| without(&layout.shim_path(), &search));
    let source = programs::become_program(&program, arguments, GUARD, search.as_deref());
    Err(RuntimeError::Start { program, source })
}

/// The runtime behind this one.
fn real(layout: &Layout) -> Result<PathBuf, RuntimeError> {
    let config = || layout.config().to_owned();
    if programs::came_back(GUARD) {
        return Err(RuntimeError::Loop { this: programs::this()?, config: config() });
    }
    let names = configured(layout.config()).path;
    let search = env::var_os("PATH");
    names.iter().find_map(|name| programs::find(name, None, search.as_deref())).ok_or_else(|| {
        let names: Vec<String> = names.iter().map(|name| name.display().to_string()).collect();
        RuntimeError::NoRuntime { names: names.join(", "), config: config() }
    })
}

/// `[runtime]` of the host's configuration, and the default where nobody can read it: who asks for no share does not
/// depend on the rest of it, and who does is refused later.
fn configured(path: &Path) -> Runtime {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct OnlyRuntime {
        runtime: Runtime,
    }
    let text = file::read(path).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
    // what is broken elsewhere in the file must not move containers to another runtime
    let (table, _) = DeTable::parse_recoverable(&text);
    OnlyRuntime::deserialize(toml::Deserializer::from(table)).unwrap_or_default().runtime
}

/// `PATH` as it was before our shim put its directory in front, so that a runtime which looks for another one
/// (nvidia-container-runtime looks for runc) finds that and not us; `None` where there is nothing to take out.
fn without(directory: &Path, search: &OsStr) -> Option<OsString> {
    let ours = |entry: &PathBuf| entry == directory;
    env::split_paths(search)
        .any(|entry| ours(&entry))
        .then(|| env::join_paths(env::split_paths(search).filter(|entry| !ours(entry))).ok())
        .flatten()
}

/// Gives the container what it asks for.
fn edit(bundle: &Bundle, layout: &Layout) -> Result<(), RuntimeError> {
    let Some(original) = look(&bundle.spec)? else { return Ok(()) };
    if !inject::concerns(&original) {
        return Ok(());
    }
    let setting = Setting {
        layout: layout.clone(),
        programs: programs::all().map_err(|error| error.to_string()),
        // this process, which exec leaves the same
        holder: Process::this().map_err(RuntimeError::Holder)?,
        lapses_after: None,
        spec: fs::canonicalize(&bundle.spec).ok(),
    };
    inject::inject(&original, &setting, |edited| write(&bundle.spec, &original, edited))?;
    Ok(())
}

/// The container's spec; none where the real runtime cannot read it either, and says so in its own words.
fn look(path: &Path) -> Result<Option<Vec<u8>>, RuntimeError> {
    match file::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        // a pipe or a huge file is something that the real runtime reads
        Err(source)
            if matches!(source.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::FileTooLarge)
                && !path.is_dir() =>
        {
            Err(RuntimeError::Unseen { path: path.to_owned(), source })
        }
        Err(_) => Ok(None),
    }
}

/// Puts the edited spec where the real runtime reads it, or leaves the original there.
fn write(path: &Path, original: &[u8], edited: &[u8]) -> io::Result<()> {
    let file = fs::canonicalize(path)?;
    // not forced to the disk: a bundle is read in this boot only, and its engine writes it anew in the next
    file::replace_for_this_boot(&file, edited)?;
    // `/dev/fd/3` leads to an open file, which stays the old one
    if fs::read(path)? == edited {
        return Ok(());
    }
    file::replace_for_this_boot(&file, original)?;
    let reason = format!("{} still leads to the old one; give a path in a directory", path.display());
    Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configured_by(text: &str) -> Vec<PathBuf> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        configured(file.path()).path
    }

    #[test]
    fn the_real_runtime_is_known_whatever_else_is_wrong_in_the_configuration() {
        assert_eq!(configured_by("[runtime]\npath = \"crun\""), [PathBuf::from("crun")]);
        assert_eq!(configured_by("[runtime]\npath = \"crun\"\n[polcy]\nx = 1"), [PathBuf::from("crun")]);
        for broken in
            ["", "banana", "[runtime]\npath = []", "[runtime]\npth = \"crun\"", "[policy]\nslices = 0"]
        {
            assert_eq!(configured_by(broken), Runtime::default().path, "{broken:?}");
        }
        assert_eq!(configured(Path::new("/")), Runtime::default());
    }

    #[test]
    fn only_the_shims_own_directory_leaves_the_path() {
        let ours = Path::new("/run/oci-mps/bin");
        assert_eq!(without(ours, OsStr::new("/run/oci-mps/bin:/a:/b")), Some("/a:/b".into()));
        assert_eq!(without(ours, OsStr::new("/a:/b")), None);
        assert_eq!(without(ours, OsStr::new("")), None);
    }

    #[test]
    fn what_the_real_runtime_could_read_and_we_cannot_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("config.json");
        assert!(look(&missing).unwrap().is_none());
        assert!(look(directory.path()).unwrap().is_none());
        let error = look(Path::new("/dev/null")).unwrap_err().to_string();
        assert!(error.contains("/dev/null, which is not a regular file"), "{error}");
    }

    #[test]
    fn a_spec_behind_a_descriptor_is_not_believed_to_be_edited() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        fs::write(&path, "old").unwrap();
        let open = fs::File::open(&path).unwrap();
        let behind = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
        let error = write(Path::new(&behind), b"old", b"new").unwrap_err().to_string();
        assert!(error.contains("still leads to the old one"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"old", "nothing was changed");
        write(&path, b"old", b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }
}
