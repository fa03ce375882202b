//! The ledger: every share that was promised in this boot, in one file that is read, decided upon and written under
//! one lock.
//!
//! A share is *reserved* when its container's spec is edited, *attached* when the container exists (`createRuntime`)
//! and *released* when it is gone (`poststop`). What never gets that far is *reaped*: the process that held a
//! reservation ended without a container, its bundle was removed, or the container's own process ended and nobody
//! called `poststop`.
//!
//! The file counts for one boot only, so it is written whole but not synced: after a crash of the machine nobody
//! holds a share. It is JSON, one record a line: a decision needs of each record only what was promised, so the rest of
//! a line is neither understood nor written anew by those whom it does not concern (benches/admission.rs).

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use crate::file::{self, Lock};
use crate::kernel::{self, Process};
use crate::layout::Layout;
use crate::origin::Origin;
use crate::share::{Share, Token};

/// How long a container waits for others that are being decided upon. Each takes about a millisecond, but where 500 come
/// at once to a machine of two cores, each is also interrupted by all the others. Podman gives its hook 15 s in all.
const PATIENCE: Duration = Duration::from_secs(8);

/// Where the ledger is.
#[derive(Clone, Debug)]
pub struct Ledger {
    file: PathBuf,
    next: PathBuf,
    lock: PathBuf,
}

/// The ledger, open: nobody else changes it until this is dropped.
#[derive(Debug)]
pub struct Book {
    file: PathBuf,
    next: PathBuf,
    content: Content,
    waited: Duration,
    _lock: Lock,
}

/// One line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// What was promised. First in its line, so that it can be read without the rest.
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
        /// Its `config.json`, where the runtime was given one; without it there will be none either.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        spec: Option<PathBuf>,
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
    /// Which engine made it, and what it is called there.
    #[serde(flatten)]
    pub origin: Origin,
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
        "the ledger {} is damaged ({how}); with no container of oci-mps running it can be removed",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where and how.
        how: String,
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

#[derive(Debug)]
struct Content {
    boot: String,
    lines: Vec<Line>,
}

/// One record: what was promised, and all of it as it stands in the file.
#[derive(Debug)]
struct Line {
    share: Share,
    text: String,
}

/// Around the boot id, and after the last record.
const HEAD: [&str; 2] = ["{\"boot\":\"", "\",\"shares\":["];
const TAIL: &str = "]}";

/// How each record begins, before what was promised.
const SHARE: &str = "{\"share\":";

impl Line {
    fn read(text: &str) -> Result<Self, String> {
        let share = text.strip_prefix(SHARE).filter(|_| text.ends_with('}')).ok_or("is no record of ours")?;
        let mut first = serde_json::Deserializer::from_str(share).into_iter::<Share>();
        let share = first.next().ok_or("is cut off")?.map_err(|error| error.to_string())?;
        Ok(Self { share, text: text.to_owned() })
    }

    fn of(record: &Record) -> Result<Self, serde_json::Error> {
        Ok(Self { share: record.share.clone(), text: serde_json::to_string(record)? })
    }

    fn record(&self) -> Result<Record, serde_json::Error> {
        serde_json::from_str(&self.text)
    }
}

impl Content {
    fn read(text: &str) -> Result<Self, String> {
        let (head, rest) = text.split_once('\n').ok_or("it ends too early")?;
        let boot = head.strip_prefix(HEAD[0]).and_then(|head| head.strip_suffix(HEAD[1]));
        let boot = boot.ok_or("it does not begin as one of ours")?.to_owned();
        let records = rest.trim_end().strip_suffix(TAIL).ok_or("it ends too early")?;
        let line = |(number, line): (usize, &str)| {
            Line::read(line.trim_end_matches(',')).map_err(|how| format!("line {}: {how}", number + 2))
        };
        let lines = records.lines().enumerate().map(line).collect::<Result<_, _>>()?;
        Ok(Self { boot, lines })
    }

    fn write(&self) -> String {
        let size: usize = self.lines.iter().map(|line| line.text.len() + 2).sum();
        let mut text = String::with_capacity(size + 128);
        text.extend([HEAD[0], &self.boot, HEAD[1], "\n"]);
        for (position, line) in self.lines.iter().enumerate() {
            text += &line.text;
            text += if position + 1 < self.lines.len() { ",\n" } else { "\n" };
        }
        text + TAIL + "\n"
    }
}

impl Ledger {
    /// The ledger of this layout.
    pub fn new(layout: &Layout) -> Self {
        Self { file: layout.shares(), next: layout.shares_next(), lock: layout.shares_lock() }
    }

    /// Opens it for a decision. Records of another boot are gone.
    ///
    /// # Errors
    /// Where it cannot be locked in time, read or understood.
    pub fn open(&self) -> Result<Book, LedgerError> {
        let begun = Instant::now();
        let lock = Lock::acquire(&self.lock, PATIENCE).map_err(failed("lock", &self.lock))?;
        let waited = begun.elapsed();
        let (file, next) = (self.file.clone(), self.next.clone());
        Ok(Book { file, next, content: self.content()?, waited, _lock: lock })
    }

    /// What stands in it now. Without the lock: for looking, not for deciding.
    ///
    /// # Errors
    /// Where it cannot be read or understood.
    pub fn records(&self) -> Result<Vec<Record>, LedgerError> {
        let content = self.content()?;
        content.lines.iter().map(|line| line.record().map_err(damaged(&self.file))).collect()
    }

    fn content(&self) -> Result<Content, LedgerError> {
        let boot = kernel::boot_id().map_err(failed("learn the boot id for", &self.file))?;
        let bytes = match file::read(&self.file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Content { boot, lines: Vec::new() });
            }
            other => other.map_err(failed("read", &self.file))?,
        };
        let content = std::str::from_utf8(&bytes)
            .map_err(|error| error.to_string())
            .and_then(Content::read)
            .map_err(|how| LedgerError::Damaged { path: self.file.clone(), how })?;
        if content.boot == boot { Ok(content) } else { Ok(Content { boot, lines: Vec::new() }) }
    }
}

impl Book {
    /// The record of that name.
    ///
    /// # Errors
    /// Where the record is damaged.
    pub fn find(&self, token: &Token) -> Result<Option<Record>, LedgerError> {
        let line = self.content.lines.iter().find(|line| line.share.token == *token);
        line.map(|line| line.record().map_err(damaged(&self.file))).transpose()
    }

    /// The records that somebody may mean by a name: a container's id or the beginning of it, what its engine calls
    /// it, or the share's own token.
    ///
    /// # Errors
    /// Where a record is damaged.
    pub fn meant_by(&self, name: &str) -> Result<Vec<Record>, LedgerError> {
        let mut meant = Vec::new();
        for line in self.content.lines.iter().filter(|line| line.text.contains(name)) {
            let record = line.record().map_err(damaged(&self.file))?;
            let is_container = matches!(&record.owner, Owner::Attached(container)
                if container.id.starts_with(name) || container.origin.name.as_deref() == Some(name));
            if is_container || record.share.token.as_str() == name {
                meant.push(record);
            }
        }
        Ok(meant)
    }

    /// Everybody else's shares.
    pub fn others(&self, token: &Token) -> Vec<&Share> {
        self.content.lines.iter().map(|line| &line.share).filter(|share| share.token != *token).collect()
    }

    /// How long others had it open meanwhile.
    pub fn waited(&self) -> Duration {
        self.waited
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
        spec: Option<PathBuf>,
    ) -> Result<(), LedgerError> {
        let since = now();
        let lapses = lapses_after.map(|after| since + after.as_secs());
        self.content.lines.retain(|line| line.share.token != share.token);
        let record = Record { share, since, owner: Owner::Reserved { holder, lapses, spec } };
        self.content.lines.push(Line::of(&record).map_err(damaged(&self.file))?);
        self.write()
    }

    /// Says which container has the share. What a dead container of that id and bundle had, it has no more: an engine
    /// that starts one again need not have called `poststop` in between.
    ///
    /// # Errors
    /// Where nothing is reserved under that name, another container has it, or the ledger cannot be written.
    pub fn attach(&mut self, token: &Token, container: Container) -> Result<(), LedgerError> {
        let record = self.find(token)?.ok_or_else(|| LedgerError::NotReserved { token: token.clone() })?;
        match &record.owner {
            Owner::Attached(present) if *present == container => return Ok(()),
            Owner::Attached(present) if present.runs() => {
                return Err(LedgerError::Taken { token: token.clone(), container: present.id.clone() });
            }
            _ => {}
        }
        let file = self.file.clone();
        let was_its = |line: &Line| {
            line.share.token != *token
                && line.text.contains(container.id.as_str())
                && line.record().is_ok_and(|record| {
                    // by its first process alone: in the cgroup there are the new run's already
                    matches!(&record.owner, Owner::Attached(earlier)
                        if earlier.id == container.id && earlier.bundle == container.bundle
                            && !earlier.process.is_alive())
                })
        };
        self.content.lines.retain(|line| !was_its(line));
        let record = Record { owner: Owner::Attached(container), ..record };
        let attached = Line::of(&record).map_err(damaged(&file))?;
        if let Some(line) = self.content.lines.iter_mut().find(|line| line.share.token == *token) {
            *line = attached;
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
        match self.find(token)? {
            Some(record) if is_theirs(&record) => self.forget(token),
            _ => Ok(false),
        }
    }

    /// Drops a record, whoever has it. Whether there was one.
    ///
    /// # Errors
    /// Where the ledger cannot be written.
    pub fn forget(&mut self, token: &Token) -> Result<bool, LedgerError> {
        self.keep(|line| line.share.token != *token).map(|dropped| dropped > 0)
    }

    /// Drops what nobody will ever give back, and says how many that were.
    ///
    /// # Errors
    /// Where the ledger cannot be written, or a record is damaged.
    pub fn reap(&mut self) -> Result<usize, LedgerError> {
        let mut dead = Vec::new();
        for line in &self.content.lines {
            let record = line.record().map_err(damaged(&self.file))?;
            if !record.is_live() {
                dead.push(record.share.token);
            }
        }
        self.keep(|line| !dead.contains(&line.share.token))
    }

    fn keep(&mut self, stays: impl Fn(&Line) -> bool) -> Result<usize, LedgerError> {
        let before = self.content.lines.len();
        self.content.lines.retain(stays);
        let dropped = before - self.content.lines.len();
        if dropped > 0 {
            self.write()?;
        }
        Ok(dropped)
    }

    fn write(&self) -> Result<(), LedgerError> {
        file::replace_by(&self.file, &self.next, self.content.write().as_bytes())
            .map_err(failed("write", &self.file))
    }
}

impl Record {
    /// Whether somebody still has, or will have, the share.
    pub fn is_live(&self) -> bool {
        match &self.owner {
            Owner::Reserved { holder, lapses, spec } => {
                lapses.is_none_or(|lapses| now() < lapses)
                    && holder.is_alive()
                    && spec.as_ref().is_none_or(|spec| spec.exists())
            }
            Owner::Attached(container) => container.runs(),
        }
    }

    /// What people call whoever has the share.
    pub fn holder_name(&self) -> String {
        match &self.owner {
            Owner::Reserved { holder, .. } => format!("a container that process {} makes", holder.pid),
            Owner::Attached(container) => container.short_name().to_owned(),
        }
    }

    /// Whether the share belongs to a container that runs.
    pub fn is_a_running_containers(&self) -> bool {
        matches!(&self.owner, Owner::Attached(container) if container.runs())
    }
}

impl Container {
    /// Whether any of it runs: in the host's PID namespace the first process may end before the others.
    pub fn runs(&self) -> bool {
        self.process.is_alive() || self.has_processes()
    }

    /// Whether anything runs in its cgroup, where that is the container's own: its path then names it.
    fn has_processes(&self) -> bool {
        self.cgroup.as_ref().is_some_and(|path| path.contains(&self.id) && kernel::has_processes(path))
    }

    /// Its name where the engine gives it one, else its id, of which engines show twelve digits.
    pub fn short_name(&self) -> &str {
        match &self.origin.name {
            Some(name) => name,
            None => self.short_id(),
        }
    }

    /// Its id; of one that an engine made up, as much as engines show.
    pub fn short_id(&self) -> &str {
        let is_made_up = self.id.len() == 64 && self.id.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_made_up { &self.id[..12] } else { &self.id }
    }
}

fn damaged(path: &Path) -> impl Fn(serde_json::Error) -> LedgerError {
    let path = path.to_owned();
    move |error| LedgerError::Damaged { path: path.clone(), how: error.to_string() }
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LedgerError {
    move |source| LedgerError::File { what, path: path.to_owned(), source }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
