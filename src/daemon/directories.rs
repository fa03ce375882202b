//! The daemon's directories: made before it starts, trusted only where nobody else can write, and the one that
//! containers see.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;

use nix::unistd::Uid;

use super::DaemonError;
use crate::kernel;
use crate::layout::Layout;

/// Makes what is missing. The daemon itself would make its pipe directory with 0777.
pub(super) fn prepare(layout: &Layout) -> Result<(), DaemonError> {
    for (path, mode) in [(layout.state(), 0o755), (&layout.pipe(), 0o711), (layout.logs(), 0o755)] {
        make(path, mode)?;
    }
    trust(layout)
}

/// A directory with exactly that mode, whatever the umask; one that is there stays as it is.
pub(super) fn make(path: &Path, mode: u32) -> Result<(), DaemonError> {
    let failed = |source| DaemonError::Directory { path: path.to_owned(), source };
    if let Some(above) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(above).map_err(failed)?;
    }
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Whether the directories that decide who is talked to are ours alone; what is not there cannot mislead.
pub(super) fn trust(layout: &Layout) -> Result<(), DaemonError> {
    trust_one(layout.state())?;
    trust_one(&layout.pipe())
}

fn trust_one(path: &Path) -> Result<(), DaemonError> {
    let not_trusted = |why: String| Err(DaemonError::NotTrusted { path: path.to_owned(), why });
    let directory = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(DaemonError::Directory { path: path.to_owned(), source }),
        Ok(directory) => directory,
    };
    let mode = directory.permissions().mode() & 0o7777;
    if !directory.is_dir() {
        not_trusted("is not a directory".to_owned())
    } else if directory.uid() != 0 && directory.uid() != Uid::effective().as_raw() {
        not_trusted(format!("belongs to user {}", directory.uid()))
    } else if mode & 0o022 != 0 {
        not_trusted(format!("can be written by others (mode {mode:04o})"))
    } else {
        Ok(())
    }
}

/// Whether containers would reach the daemon that runs now, and nothing else.
pub(super) fn client_is_current(layout: &Layout) -> bool {
    let client = layout.client();
    kernel::same_file(&layout.pipe().join("control"), &client.join("control"))
        && fs::read_dir(client).is_ok_and(|entries| entries.count() == 1)
}

/// Gives the client directory the socket of the daemon that runs now, and takes away everything else.
///
/// The directory itself stays, since containers have it mounted.
pub(super) fn renew_client(layout: &Layout) -> Result<(), DaemonError> {
    let (client, socket) = (layout.client(), layout.pipe().join("control"));
    make(&client, 0o755)?;
    trust_one(&client)?;
    let failed = |source| DaemonError::Client { path: client.clone(), source };
    if !fs::symlink_metadata(&socket).map_err(failed)?.file_type().is_socket() {
        return Err(failed(io::Error::other(format!("{} is not a socket", socket.display()))));
    }
    link_over(&socket, &client.join("control"), layout.state()).map_err(failed)?;
    empty_but(&client, Some("control")).map_err(failed)
}

/// Takes away what containers could have reached a daemon by.
pub(super) fn clear_client(layout: &Layout) -> Result<(), DaemonError> {
    let client = layout.client();
    match empty_but(&client, None) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(DaemonError::Client { path: client, source: error })
        }
        _ => Ok(()),
    }
}

/// Links `file` at `to` in one step, by way of `aside`: containers never see the name missing or a second one.
fn link_over(file: &Path, to: &Path, aside: &Path) -> io::Result<()> {
    if kernel::same_file(file, to) {
        return Ok(());
    }
    let temporary = aside.join(".control");
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::hard_link(file, &temporary)?;
    if fs::symlink_metadata(to).is_ok_and(|there| there.is_dir()) {
        fs::remove_dir_all(to)?;
    }
    fs::rename(&temporary, to)
}

fn empty_but(directory: &Path, kept: Option<&str>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if kept.is_some_and(|kept| entry.file_name() == kept) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Owner, env};
    use std::os::unix::net::UnixListener;

    fn layout(state: &Path) -> Layout {
        Layout::new(Owner::Root, |name| (name == env::STATE_DIR).then(|| state.into()))
    }

    #[test]
    fn the_client_directory_follows_the_daemons_socket_and_holds_nothing_else() {
        let state = tempfile::tempdir().unwrap();
        let layout = layout(&state.path().join("state"));
        prepare(&layout).unwrap();
        let socket = layout.pipe().join("control");
        for _daemon in 0..2 {
            let _ = fs::remove_file(&socket);
            let _listener = UnixListener::bind(&socket).unwrap();
            assert!(!client_is_current(&layout));
            renew_client(&layout).unwrap();
            assert!(client_is_current(&layout));
        }
        fs::create_dir_all(layout.client().join("old/older")).unwrap();
        fs::write(layout.client().join(".left"), "").unwrap();
        assert!(!client_is_current(&layout));
        renew_client(&layout).unwrap();
        assert!(client_is_current(&layout));
        assert!(!layout.state().join(".control").exists());
        clear_client(&layout).unwrap();
        assert_eq!(fs::read_dir(layout.client()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_no_socket_is_given_to_nobody() {
        let state = tempfile::tempdir().unwrap();
        let layout = layout(&state.path().join("state"));
        prepare(&layout).unwrap();
        fs::write(layout.pipe().join("control"), "").unwrap();
        let error = renew_client(&layout).unwrap_err().to_string();
        assert!(error.contains("is not a socket"), "{error}");
    }

    #[test]
    fn directories_that_others_can_write_are_refused() {
        let state = tempfile::tempdir().unwrap();
        let layout = layout(&state.path().join("state"));
        prepare(&layout).unwrap();
        assert_eq!(fs::metadata(layout.pipe()).unwrap().permissions().mode() & 0o7777, 0o711);
        for path in [layout.pipe(), layout.state().to_owned()] {
            let mode = fs::metadata(&path).unwrap().permissions();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
            let error = trust(&layout).unwrap_err().to_string();
            assert!(error.contains(&*path.to_string_lossy()) && error.contains("mode 0777"), "{error}");
            fs::set_permissions(&path, mode).unwrap();
        }
        trust(&layout).unwrap();
    }

    #[test]
    fn a_link_is_not_the_directory_it_leads_to() {
        let state = tempfile::tempdir().unwrap();
        let layout = layout(&state.path().join("state"));
        make(layout.state(), 0o755).unwrap();
        std::os::unix::fs::symlink("/tmp", layout.pipe()).unwrap();
        assert!(prepare(&layout).unwrap_err().to_string().contains("is not a directory"));
    }
}
