//! What the kernel knows and nobody can forge: which boot this is, which process is meant, who holds a lock.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::{Uid, getppid};
use serde::{Deserialize, Serialize};

use crate::layout::Owner;

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number, as this process's PID namespace counts.
    pub pid: i32,
    /// When it started, in clock ticks since boot (`/proc/<pid>/stat`, field 22).
    pub started: u64,
}

impl Process {
    /// The process that has this number now.
    ///
    /// # Errors
    /// Where there is none, or `/proc` is not readable.
    pub fn find(pid: i32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let started = start_time(&stat).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is malformed"))
        })?;
        Ok(Self { pid, started })
    }

    /// This process.
    ///
    /// # Errors
    /// Where `/proc` is not readable.
    pub fn this() -> io::Result<Self> {
        Self::find(nix::unistd::getpid().as_raw())
    }

    /// The process that started this one.
    ///
    /// # Errors
    /// Where `/proc` is not readable.
    pub fn parent() -> io::Result<Self> {
        Self::find(getppid().as_raw())
    }

    /// Whether it still runs. A zombie, which has ended and waits to be noticed, does not.
    pub fn is_alive(self) -> bool {
        fs::read_to_string(format!("/proc/{}/stat", self.pid)).is_ok_and(|stat| {
            start_time(&stat) == Some(self.started) && !matches!(state(&stat), Some('Z' | 'X'))
        })
    }

    /// Whether it was stopped by a signal or a debugger.
    pub fn is_stopped(self) -> bool {
        fs::read_to_string(format!("/proc/{}/stat", self.pid))
            .is_ok_and(|stat| matches!(state(&stat), Some('T' | 't')))
    }

    /// Its cgroup: the path in the unified hierarchy, else in the first one listed.
    pub fn cgroup(self) -> Option<String> {
        let groups = fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).ok()?;
        let path = |line: &str| line.splitn(3, ':').nth(2).map(str::to_owned);
        let unified = groups.lines().find(|line| line.starts_with("0::") && *line != "0::/");
        unified.or_else(|| groups.lines().next()).and_then(path)
    }
}

/// The fields after the command's name, which stands in parentheses and may hold anything, parentheses too.
fn fields(stat: &str) -> impl Iterator<Item = &str> {
    stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_ascii_whitespace()
}

fn state(stat: &str) -> Option<char> {
    fields(stat).next()?.chars().next()
}

fn start_time(stat: &str) -> Option<u64> {
    // proc(5): starttime is field 22, the state, which comes first here, field 3
    fields(stat).nth(22 - 3)?.parse().ok()
}

/// The sockets that a process holds, by the kernel's names for them.
///
/// # Errors
/// Where there is no such process, or it is somebody else's.
pub fn sockets(pid: i32) -> io::Result<BTreeSet<String>> {
    let mut sockets = BTreeSet::new();
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // a descriptor may be closed while they are listed
        if let Ok(target) = fs::read_link(descriptor?.path())
            && let Some(name) = target.to_str().filter(|name| name.starts_with("socket:"))
        {
            sockets.insert(name.to_owned());
        }
    }
    Ok(sockets)
}

/// Whether any process is in that cgroup, of whichever hierarchy it is.
pub fn has_processes(cgroup: &str) -> bool {
    let hierarchies =
        fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    [PathBuf::from("/sys/fs/cgroup")].into_iter().chain(hierarchies).any(|hierarchy| {
        let processes = hierarchy.join(cgroup.trim_start_matches('/')).join("cgroup.procs");
        fs::read(processes).is_ok_and(|processes| !processes.is_empty())
    })
}

/// The kernel's name for the time since it was last started.
///
/// # Errors
/// Where `/proc` is not readable.
pub fn boot_id() -> io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim_end().to_owned())
}

/// 32 random hexadecimal digits, 122 bits of them random.
///
/// # Errors
/// Where `/proc` is not readable.
pub fn random_token() -> io::Result<String> {
    let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(uuid.chars().filter(char::is_ascii_hexdigit).collect())
}

/// Who holds a write lock (`fcntl`) on the file; nobody where there is no such file.
///
/// # Errors
/// Where the file cannot be opened or asked about.
pub fn lock_holder(path: &Path) -> io::Result<Option<i32>> {
    // whatever else may have been put there in the lock's place is not waited for
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW;
    let file = match File::options().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut lock = nix::libc::flock {
        l_type: i16::try_from(nix::libc::F_WRLCK).unwrap_or_default(),
        l_whence: 0,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_GETLK(&mut lock))?;
    let free = i32::from(lock.l_type) == nix::libc::F_UNLCK;
    Ok((!free).then_some(lock.l_pid))
}

/// Whether two paths lead to one file; not where either leads nowhere.
pub fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    identity(one).is_some_and(|one| identity(other) == Some(one))
}

/// On whose behalf this process works: a container engine without root runs its hooks as user 0 of a user namespace
/// of its own, which is still that user. Such an engine maps itself alone to user 0; a system container, whose user 0
/// is that system's root, maps a whole range.
pub fn owner() -> Owner {
    let uid = Uid::effective().as_raw();
    match mapping(uid, &uid_map()) {
        Some(Mapping { host: 1.., count: 2.. }) | None if uid == 0 => Owner::Root,
        Some(Mapping { host: 0, .. }) => Owner::Root,
        Some(Mapping { host, .. }) => Owner::User(host),
        None => Owner::User(uid),
    }
}

/// Whether this process is in a user namespace other than the machine's first: what may be mounted is then less.
pub fn is_in_user_namespace() -> bool {
    uid_map().split_ascii_whitespace().ne(["0", "0", "4294967295"])
}

fn uid_map() -> String {
    fs::read_to_string("/proc/self/uid_map").unwrap_or_default()
}

/// Where a user id of a namespace comes from.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    /// The id outside.
    host: u32,
    /// How many ids are mapped together with it.
    count: u32,
}

/// What a user id inside a namespace is outside of it (`user_namespaces(7)`: inside, outside, count).
fn mapping(uid: u32, map: &str) -> Option<Mapping> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(|number| number.parse::<u32>().ok());
        let (inside, outside, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let offset = uid.checked_sub(inside).filter(|offset| *offset < count)?;
        Some(Mapping { host: outside.checked_add(offset)?, count })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_alive_until_it_ended_even_before_it_is_reaped() {
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap();
        let process = Process::find(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(process.is_alive());
        assert!(
            !Process { started: process.started + 1, ..process }.is_alive(),
            "another with the same number"
        );
        child.kill().unwrap();
        while process.is_alive() {
            std::thread::yield_now();
        }
        assert!(Path::new(&format!("/proc/{}", process.pid)).exists(), "a zombie");
        child.wait().unwrap();
        assert!(!process.is_alive());
    }

    #[test]
    fn a_command_named_like_the_rest_of_the_line_confuses_nobody() {
        let stat = "7 (a) S 1 (b) Z 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!((state(stat), start_time(stat)), (Some('Z'), Some(4242)));
        assert_eq!(start_time("garbage"), None);
    }

    #[test]
    fn nobody_holds_a_lock_on_a_file_that_is_not_there() {
        assert_eq!(lock_holder(Path::new("/nonexistent/control_lock")).unwrap(), None);
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(lock_holder(file.path()).unwrap(), None);
    }

    #[test]
    fn users_are_known_by_their_number_on_the_host() {
        let host = |uid, map: &str| mapping(uid, map).map(|mapping| mapping.host);
        assert_eq!(host(0, "         0          0 4294967295\n"), Some(0));
        let rootless = "         0       1000          1\n         1     100000      65536\n";
        assert_eq!(mapping(0, rootless), Some(Mapping { host: 1000, count: 1 }));
        assert_eq!(host(33, rootless), Some(100_032));
        assert_eq!(host(70_000, rootless), None);
        assert_eq!(host(0, ""), None);
    }

    #[test]
    fn tokens_are_long_and_differ() {
        let (one, other) = (random_token().unwrap(), random_token().unwrap());
        assert_eq!((one.len(), other.len()), (32, 32));
        assert_ne!(one, other);
    }
}
