//! Other processes, by what `/proc` says of them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;

pub(crate) struct Process {
    pub(crate) pid: i32,
    name: String,
}

impl Process {
    /// The first 15 characters of its program's name, or what it calls itself.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn read(&self, file: &str) -> Vec<u8> {
        fs::read(format!("/proc/{}/{file}", self.pid)).unwrap_or_default()
    }

    pub(crate) fn has_variable(&self, name: &str, value: &Path) -> bool {
        let wanted = [name.as_bytes(), b"=", value.as_os_str().as_bytes()].concat();
        self.read("environ").split(|byte| *byte == 0).any(|variable| variable == wanted)
    }

    /// Whether its arguments or its environment speak of that path.
    pub(crate) fn mentions(&self, path: &Path) -> bool {
        let wanted = path.as_os_str().as_bytes();
        ["cmdline", "environ"].iter().any(|file| memchr::memmem::find(&self.read(file), wanted).is_some())
    }

    /// Its arguments, for people.
    pub(crate) fn command_line(&self) -> String {
        let arguments = self.read("cmdline");
        let words: Vec<_> = arguments
            .split(|byte| *byte == 0)
            .map(|word| OsStr::from_bytes(word).to_string_lossy())
            .collect();
        words.join(" ")
    }

    /// What `/proc/<pid>/stat` says after the name: the state, the parent, …
    fn stat(&self) -> Option<String> {
        String::from_utf8(self.read("stat")).ok()?.rsplit_once(") ").map(|(_, rest)| rest.to_owned())
    }

    fn parent(&self) -> Option<i32> {
        self.stat()?.split(' ').nth(1)?.parse().ok()
    }

    /// Whether it is the first process of a process namespace that is not ours.
    pub(crate) fn is_a_containers_first(&self) -> bool {
        let status = String::from_utf8_lossy(&self.read("status")).into_owned();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
        numbers.split_whitespace().count() > 1 && numbers.ends_with("\t1")
    }

    /// Dead ones wait for their parent and do nothing more.
    fn is_dead(&self) -> bool {
        self.stat().is_none_or(|stat| stat.starts_with(['Z', 'X']))
    }
}

/// All that live, are not this one, and are wanted.
pub(crate) fn find(wanted: impl Fn(&Process) -> bool) -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| *pid != std::process::id().cast_signed())
        .filter_map(|pid| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned();
            Some(Process { pid, name })
        })
        .filter(|process| wanted(process) && !process.is_dead())
        .collect()
}

fn kill_at_once(pid: i32) {
    let _ = signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
}

/// Kills it, and comes back when it is gone.
pub(crate) fn kill(pid: i32) {
    kill_at_once(pid);
    wait_for(Duration::from_secs(5), || find(|process| process.pid == pid).is_empty());
}

pub(crate) fn send(pid: i32, signal: Signal) {
    signal::kill(Pid::from_raw(pid), signal).unwrap_or_else(|error| panic!("signalling {pid}: {error}"));
}

/// Looks until it is so; whether it ever was.
pub(crate) fn wait_for(patience: Duration, is_so: impl Fn() -> bool) -> bool {
    let begun = std::time::Instant::now();
    while !is_so() {
        if begun.elapsed() > patience {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Kills it and everything that it started, the youngest last so that nobody is born meanwhile.
pub(crate) fn kill_tree(pid: i32) {
    let children = find(|process| process.parent() == Some(pid));
    kill_at_once(pid);
    for child in children {
        kill_tree(child.pid);
    }
}
