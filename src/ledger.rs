//! The ledger: every share that was promised in this boot, in one file that is read, decided upon and written under
//! one lock.
//!
//! A share is *reserved* when its container's spec is edited, *attached* when the container exists (`createRuntime`)
//! and *released* when it is gone (`poststop`). What never gets that far is *reaped*: the process that held a
//! reservation ended without a container, or the container's own process ended and nobody called `poststop`.
//!
//! The file counts for one boot only, so it is written whole but not synced: after a crash of the machine nobody
//! holds a share.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::file::{self, Lock};
use crate::kernel::{self, Process};
use crate::layout::Layout;
use crate::share::{Share, Token};

/// How long a container waits for others that are being decided upon. Each takes about a millisecond.
const PATIENCE: Duration = Duration::from_secs(4);

/// Where the ledger is.
#[derive(Clone, Debug)]
pub struct Ledger {
    file: PathBuf,
    lock: PathBuf,
}

/// The ledger, open: nobody else changes it until this is dropped.
#[derive(Debug)]
pub struct Book {
    file: PathBuf,
    content: Content,
    _lock: Lock,
}

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// What was promised.
    #[serde(flatten)]
    pub share: Share,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// To whom.
    #[serde(flatten)]
    pub owner: Owner,
}

/// Who has a share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Owner {
    /// A container that is about to be made.
    Reserved {
        /// The runtime or engine that makes it; without it there will be no container.
        holder: Process,
        /// When it is given up although the holder lives on, in seconds since 1970.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lapses: Option<u64>,
    },
    /// A container that exists.
    Attached(Container),
}

/// A container, as its runtime's state describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// Its bundle.
    pub bundle: PathBuf,
    /// Its first process.
    pub process: Process,
    /// The cgroup of that process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
}

/// Why the ledger cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file system, or somebody who keeps the lock.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// What came of it.
        source: io::Error,
    },
    /// Not what this program writes.
    #[error(
        "the ledger {} is damaged ({source}); with no container of oci-mps running it can be removed",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where and how.
        source: serde_json::Error,
    },
    /// There is no such share.
    #[error(
        "no share is reserved under {token}: it was given back, or belongs to another boot; create the container anew"
    )]
    NotReserved {
        /// Its name.
        token: Token,
    },
    /// The share is in use.
    #[error(
        "the share {token} already belongs to the container {container}; two containers cannot have one share"
    )]
    Taken {
        /// Its name.
        token: Token,
        /// Whose it is.
        container: String,
    },
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    boot: String,
    shares: Vec<Record>,
}

impl Ledger {
    /// The ledger of this layout.
    pub fn new(layout: &Layout) -> Self {
        Self { file: layout.shares(), lock: layout.shares_lock() }
    }

    /// Opens it for a decision. Records of another boot are gone.
    ///
    /// # Errors
    /// Where it cannot be locked in time, read or understood.
    pub fn open(&self) -> Result<Book, LedgerError> {
        let lock = Lock::acquire(&self.lock, PATIENCE).map_err(failed("lock", &self.lock))?;
        Ok(Book { file: self.file.clone(), content: self.content()?, _lock: lock })
    }

    /// What stands in it now. Without the lock: for looking, not for deciding.
    ///
    /// # Errors
    /// Where it cannot be read or understood.
    pub fn records(&self) -> Result<Vec<Record>, LedgerError> {
        Ok(self.content()?.shares)
    }

    fn content(&self) -> Result<Content, LedgerError> {
        let boot = kernel::boot_id().map_err(failed("learn the boot id for", &self.file))?;
        let bytes = match file::read(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Content { boot, shares: Vec::new() });
            }
            other => other.map_err(failed("read", &self.file))?,
        };
        let content: Content = serde_json::from_slice(&bytes)
            .map_err(|source| LedgerError::Damaged { path: self.file.clone(), source })?;
        if content.boot == boot { Ok(content) } else { Ok(Content { boot, shares: Vec::new() }) }
    }
}

impl Book {
    /// The record of that name.
    pub fn find(&self, token: &Token) -> Option<&Record> {
        self.content.shares.iter().find(|record| record.share.token == *token)
    }

    /// Everybody else's shares.
    pub fn others(&self, token: &Token) -> Vec<Share> {
        let others = self.content.shares.iter().filter(|record| record.share.token != *token);
        others.map(|record| record.share.clone()).collect()
    }

    /// Writes a promise down. The same promise a second time is one promise.
    ///
    /// # Errors
    /// Where the ledger cannot be written; nothing is promised then.
    pub fn reserve(
        &mut self,
        share: Share,
        holder: Process,
        lapses_after: Option<Duration>,
    ) -> Result<(), LedgerError> {
        let since = now();
        let lapses = lapses_after.map(|after| since + after.as_secs());
        self.content.shares.retain(|record| record.share.token != share.token);
        self.content.shares.push(Record { share, since, owner: Owner::Reserved { holder, lapses } });
        self.write()
    }

    /// Says which container has the share.
    ///
    /// # Errors
    /// Where nothing is reserved under that name, another container has it, or the ledger cannot be written.
    pub fn attach(&mut self, token: &Token, container: Container) -> Result<(), LedgerError> {
        let record = self.content.shares.iter_mut().find(|record| record.share.token == *token);
        let record = record.ok_or_else(|| LedgerError::NotReserved { token: token.clone() })?;
        match &record.owner {
            Owner::Attached(present) if *present == container => return Ok(()),
            Owner::Attached(present) if present.process.is_alive() => {
                return Err(LedgerError::Taken { token: token.clone(), container: present.id.clone() });
            }
            _ => record.owner = Owner::Attached(container),
        }
        self.write()
    }

    /// Gives a share back; `container` only its own, a reservation anybody. Whether there was one.
    ///
    /// # Errors
    /// Where the ledger cannot be written.
    pub fn release(&mut self, token: &Token, container: Option<&str>) -> Result<bool, LedgerError> {
        let is_theirs = |record: &Record| match (&record.owner, container) {
            (Owner::Attached(present), Some(id)) => present.id == id,
            (Owner::Attached(_), None) => false,
            (Owner::Reserved { .. }, _) => true,
        };
        self.drop_where(|record| record.share.token == *token && is_theirs(record)).map(|dropped| dropped > 0)
    }

    /// Drops what nobody will ever give back, and says how many that were.
    ///
    /// # Errors
    /// Where the ledger cannot be written.
    pub fn reap(&mut self) -> Result<usize, LedgerError> {
        self.drop_where(|record| !record.is_live())
    }

    fn drop_where(&mut self, goes: impl Fn(&Record) -> bool) -> Result<usize, LedgerError> {
        let before = self.content.shares.len();
        self.content.shares.retain(|record| !goes(record));
        let dropped = before - self.content.shares.len();
        if dropped > 0 {
            self.write()?;
        }
        Ok(dropped)
    }

    fn write(&self) -> Result<(), LedgerError> {
        let bytes = serde_json::to_vec(&self.content)
            .map_err(|source| LedgerError::Damaged { path: self.file.clone(), source })?;
        file::replace_for_this_boot(&self.file, &bytes).map_err(failed("write", &self.file))
    }
}

impl Record {
    /// Whether somebody still has, or will have, the share.
    pub fn is_live(&self) -> bool {
        match &self.owner {
            Owner::Reserved { holder, lapses } => {
                lapses.is_none_or(|lapses| now() < lapses) && holder.is_alive()
            }
            // in the host's PID namespace the first process may end before the others
            Owner::Attached(container) => container.process.is_alive() || container.has_processes(),
        }
    }

    /// Whether the share belongs to a container that runs.
    pub fn is_a_running_containers(&self) -> bool {
        matches!(&self.owner, Owner::Attached(container) if container.process.is_alive())
    }
}

impl Container {
    /// Whether anything runs in its cgroup, where that is the container's own: its path then names it.
    fn has_processes(&self) -> bool {
        self.cgroup.as_ref().is_some_and(|path| path.contains(&self.id) && kernel::has_processes(path))
    }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    move |source| LedgerError::File { what, path: path.to_owned(), source }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
