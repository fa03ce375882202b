//! Whether the daemon must be asked if it answers, or is known to.
//!
//! To ask is to start the control program, which takes more CPU than the rest of a container's way (1.2 ms of about
//! 2.5). What makes a living daemon silent is one connection that says nothing (seen with 535 to 580), and a connection
//! is a socket of the daemon's that was not there before. So a daemon that answered while it held certain sockets, and
//! holds no other since, still answers.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::file;
use crate::kernel::{self, Process};

/// The sockets that a daemon holds.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Connections {
    daemon: Process,
    sockets: BTreeSet<String>,
}

impl Connections {
    /// Those of the daemon with that process id; nothing where they cannot be seen, or where it is stopped.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let daemon = Process::find(pid).ok().filter(|daemon| !daemon.is_stopped())?;
        Some(Self { daemon, sockets: kernel::sockets(pid).ok()? })
    }

    /// Whether the daemon answered while it held all of these.
    pub(super) fn are_answered(&self, memory: &Path) -> bool {
        let answered: Option<Self> =
            file::read(memory).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        answered.is_some_and(|answered| {
            answered.daemon == self.daemon && self.sockets.is_subset(&answered.sockets)
        })
    }

    /// Notes that the daemon answered, though it held these. Where that cannot be noted it is asked again.
    pub(super) fn note_answered(&self, memory: &Path) {
        if let Ok(bytes) = serde_json::to_vec(self) {
            let _ = file::replace_for_this_boot(memory, &bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn own() -> Connections {
        Connections::of(i32::try_from(std::process::id()).unwrap()).unwrap()
    }

    #[test]
    fn a_new_connection_makes_an_answer_worthless() {
        let memory = tempfile::NamedTempFile::new().unwrap();
        let pair = UnixStream::pair().unwrap();
        let answered = own();
        assert!(!answered.are_answered(memory.path()), "nothing was noted yet");
        answered.note_answered(memory.path());
        assert!(answered.are_answered(memory.path()));
        let more = Connections {
            sockets: answered.sockets.iter().cloned().chain(["socket:[1]".into()]).collect(),
            ..own()
        };
        assert!(!more.are_answered(memory.path()), "a connection came");
        let fewer = Connections { sockets: BTreeSet::new(), ..own() };
        assert!(fewer.are_answered(memory.path()), "connections went");
        let mut other = own();
        other.daemon.started += 1;
        assert!(!other.are_answered(memory.path()), "another daemon");
        drop(pair);
    }
}
