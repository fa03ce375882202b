//! Files that others read: read within bounds, written whole or not at all, locked with a deadline.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Larger than any spec or inventory, small enough never to hurt the host.
pub const LARGEST: u64 = 16 << 20;

/// Reads to the end, but not more than [`LARGEST`] bytes.
///
/// # Errors
/// The reader's own, and [`io::ErrorKind::FileTooLarge`].
pub fn read_all(reader: impl Read) -> io::Result<Vec<u8>> {
    // a spec fits at once; the standard library's own growing buffer begins with 32 bytes
    let mut bytes = Vec::with_capacity(16 << 10);
    reader.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("larger than {} MiB", LARGEST >> 20),
        ));
    }
    Ok(bytes)
}

/// Reads a regular file, but not more than [`LARGEST`] bytes.
///
/// # Errors
/// The file system's own; a directory, a FIFO or a device is [`io::ErrorKind::InvalidInput`] instead of a wait.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let kind = fs::metadata(path)?.file_type();
    if !kind.is_file() {
        let what = if kind.is_dir() { "a directory" } else { "not a regular file" };
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("is {what}")));
    }
    read_all(File::open(path)?)
}

/// Puts `bytes` in the place of the file: readers see the old file or the new one, and after a crash one of them is
/// there. Mode and owner stay; a link to the file stays a link.
///
/// # Errors
/// The file system's own. The old file is then whole and nothing is left beside it.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    put_whole(path, bytes, true)
}

/// Like [`replace`], for a file that means nothing after the next boot: it is not forced to the disk.
///
/// # Errors
/// The file system's own. The old file is then whole and nothing is left beside it.
pub fn replace_for_this_boot(path: &Path, bytes: &[u8]) -> io::Result<()> {
    put_whole(path, bytes, false)
}

/// Like [`replace_for_this_boot`], for a file that is written under a lock: what a killed writer leaves lies at `next`,
/// where the next writer takes its place, and never adds up.
///
/// # Errors
/// The file system's own. The old file is then whole.
pub fn replace_by(path: &Path, next: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut whole = File::options().write(true).create(true).truncate(true).mode(0o644).open(next)?;
    whole.write_all(bytes).and_then(|()| fs::rename(next, path)).inspect_err(|_| {
        let _ = fs::remove_file(next);
    })
}

fn put_whole(path: &Path, bytes: &[u8], durably: bool) -> io::Result<()> {
    let target = match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
        other => other?,
    };
    let directory = target.parent().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut whole = tempfile::Builder::new().prefix(".oci-mps-").tempfile_in(directory)?;
    match fs::metadata(&target) {
        Ok(old) => {
            chown(whole.path(), Some(old.uid()), Some(old.gid()))?;
            whole.as_file().set_permissions(old.permissions())?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            whole.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
        }
        Err(error) => return Err(error),
    }
    whole.write_all(bytes)?;
    if durably {
        whole.as_file().sync_all()?;
    }
    whole.persist(&target).map_err(|failed| failed.error)?;
    if durably { File::open(directory)?.sync_all() } else { Ok(()) }
}

/// A lock between processes, held until it is dropped or its process ends, however that ends.
#[derive(Debug)]
pub struct Lock(
    /// Never read: the lock is the open file.
    #[expect(dead_code)]
    File,
);

impl Lock {
    /// Waits for the lock, but not beyond `patience`.
    ///
    /// # Errors
    /// The file system's own, and [`io::ErrorKind::TimedOut`] where somebody else holds it for too long.
    pub fn acquire(path: &Path, patience: Duration) -> io::Result<Self> {
        let file = File::options().create(true).truncate(false).write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => return Ok(Self(file)),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {}
        }
        // No lock call of the kernel takes a deadline, so a thread waits in it. Looking again and again would do too,
        // but the kernel lets waiters in by turns, and hundreds of containers at once need that: who only looks may
        // find the lock held each time, for seconds. A thread that is given up gets the lock one day and drops it.
        let (sender, receiver) = mpsc::channel();
        thread::Builder::new().spawn(move || sender.send(file.lock().map(|()| file)))?;
        receiver
            .recv_timeout(patience)
            .unwrap_or_else(|_| {
                Err(io::Error::new(io::ErrorKind::TimedOut, format!("held for {patience:?}")))
            })
            .map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_replaced_file_keeps_mode_and_link_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let (real, link) = (directory.path().join("real"), directory.path().join("link"));
        fs::write(&real, "old").unwrap();
        fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("real", &link).unwrap();
        replace(&link, b"new").unwrap();
        assert_eq!(fs::read(&real).unwrap(), b"new");
        assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_directory_is_an_error_that_says_so() {
        let error = read(Path::new("/")).unwrap_err();
        assert_eq!(error.to_string(), "is a directory");
    }

    #[test]
    fn what_is_too_large_is_not_read() {
        let error = read_all(io::repeat(b' ')).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn a_lock_is_waited_for_until_the_deadline_and_free_once_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = Lock::acquire(&path, Duration::ZERO).unwrap();
        let error = Lock::acquire(&path, Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(held);
        // a child that another test starts at this moment holds a copy until it has become its program
        Lock::acquire(&path, Duration::from_secs(5)).unwrap();
    }
}
