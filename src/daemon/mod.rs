//! The MPS control daemon: found, started where that is wanted, ready for a container, stopped.
//!
//! ```text
//! ready()   lives? ── no ──> start lock ── lives now? ── no ──> launch, wait
//!             └── yes ─────────────────────────┴── yes ───────────┴──> answers? ──> client directory current?
//! ```
//!
//! Whether it lives is asked of the kernel, which knows who holds the lock on `control_lock`: its files outlive it.

mod cgroup;
mod directories;
mod launch;
mod program;
mod quiet;

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub use program::Host;

use crate::config::{self, Start};
use crate::control::{self, Control, ControlError};
use crate::file::Lock;
use crate::kernel;
use crate::layout::{LONGEST_PIPE_DIRECTORY, Layout};
use launch::Launch;
use quiet::Connections;

/// How long [`Daemon::ready`] and [`Daemon::start`] may take in all, whatever hangs.
pub const READY_WITHIN: Duration = Duration::from_secs(5);

/// Of [`READY_WITHIN`], what is kept for the daemon's first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(1);

/// How long after its `quit` the daemon may still be seen.
const ENDING: Duration = Duration::from_secs(2);

/// The daemon of one instance, whether it runs or not.
#[derive(Clone, Debug)]
pub struct Daemon {
    layout: Layout,
    config: config::Daemon,
    host: Host,
}

/// How a daemon came to be ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// It ran, and nothing had to be done.
    Already,
    /// It ran, and containers had no way to it yet: somebody else had started it.
    Adopted,
    /// It was started.
    Started,
}

/// Why there is no daemon for a container.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The control program is not there.
    #[error(
        "there is no MPS control program {} here{}; install the driver's package that has it (nvidia-cuda-mps on \
         Debian, nvidia-compute-utils on Ubuntu, nvidia-driver-cuda on Fedora and RHEL) or name it with \
         [daemon] control", control.display(), searched(directories)
    )]
    NotInstalled {
        /// As it is configured.
        control: PathBuf,
        /// Where it was looked for.
        directories: Vec<PathBuf>,
    },
    /// It does not run and is not ours to start.
    #[error(
        "the MPS control daemon does not run, and [daemon] start = \"service\" leaves it to the service to start it; \
         start it with 'oci-mps up'"
    )]
    NotRunning,
    /// It ran when this container was prepared and does not run any more.
    #[error(
        "the MPS control daemon has ended since this container was prepared; start the container again, and see {} \
         for the reason", log.display()
    )]
    Ended {
        /// The daemon's log.
        log: PathBuf,
    },
    /// It was started and does not run.
    #[error("cannot start the MPS control daemon {}: {why}; {}", program.display(), logged(log, lines))]
    NotStarted {
        /// The control program.
        program: PathBuf,
        /// What happened.
        why: String,
        /// The daemon's log.
        log: PathBuf,
        /// The last lines that this start left there.
        lines: String,
    },
    /// Its socket's path would be too long, of which the daemon itself says nothing.
    #[error(
        "the path {} is too long for the MPS control daemon's sockets; it may have {LONGEST_PIPE_DIRECTORY} \
         characters: choose a shorter OCI_MPS_STATE_DIR", pipe.display()
    )]
    PathTooLong {
        /// The pipe directory.
        pipe: PathBuf,
    },
    /// Somebody else starts it, and does not come to an end.
    #[error("waited in vain for {}, which is held while the MPS control daemon is started; see who holds it with 'fuser -v'", path.display())]
    StartLocked {
        /// The lock.
        path: PathBuf,
    },
    /// Somebody else could have put sockets there.
    #[error("will not use {}: it {why}; remove it, or make it yours alone", path.display())]
    NotTrusted {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// A directory or a file in it cannot be made, read or locked.
    #[error("cannot use {}: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// The client directory cannot be brought up to date.
    #[error("cannot give containers a way to the MPS control daemon in {}: {source}", path.display())]
    Client {
        /// The client directory.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// The client directory leads to a daemon that is gone.
    #[error(
        "{} leads to an MPS control daemon that is gone; start the container again, or renew it with 'oci-mps up'",
        path.display()
    )]
    ClientOutdated {
        /// The client directory.
        path: PathBuf,
    },
    /// It was asked to end and still runs.
    #[error(
        "the MPS control daemon (process {pid}) still runs {:.1} s after it was asked to end: clients keep it, or a \
         process that is connected to its socket and keeps silent; end those, or use 'oci-mps down --force'", waited.as_secs_f32()
    )]
    StillRunning {
        /// Who holds its lock.
        pid: i32,
        /// How long it was waited for.
        waited: Duration,
    },
    /// It runs and does not do as it is told; a wedged one above all.
    #[error(transparent)]
    Control(#[from] ControlError),
}

fn searched(directories: &[PathBuf]) -> String {
    if directories.is_empty() {
        return String::new();
    }
    let paths: Vec<String> = directories.iter().map(|path| path.display().to_string()).collect();
    format!(" (looked in {})", paths.join(", "))
}

fn logged(log: &Path, lines: &str) -> String {
    if lines.is_empty() {
        format!("it wrote nothing to {}", log.display())
    } else {
        format!("{} ends with:{lines}", log.display())
    }
}

type Result<T> = std::result::Result<T, DaemonError>;

impl Daemon {
    /// The daemon of that layout on this host.
    pub fn new(layout: &Layout, config: &config::Daemon) -> Self {
        Self::on(Host::default(), layout, config)
    }

    /// The daemon of that layout on a host that is described.
    pub fn on(host: Host, layout: &Layout, config: &config::Daemon) -> Self {
        Self { layout: layout.clone(), config: config.clone(), host }
    }

    /// The way to give it commands.
    ///
    /// # Errors
    /// [`DaemonError::NotInstalled`].
    pub fn control(&self) -> Result<Control> {
        let named = &self.config.control;
        let program = self.host.find(named).ok_or_else(|| DaemonError::NotInstalled {
            control: named.clone(),
            directories: if named.is_absolute() { Vec::new() } else { self.host.program_directories.clone() },
        })?;
        Ok(Control::new(&program, &self.layout))
    }

    /// The process that is the daemon, where one lives: 0 where it is in another PID namespace.
    ///
    /// # Errors
    /// Where its lock cannot be looked at.
    pub fn process(&self) -> Result<Option<i32>> {
        let path = self.layout.pipe().join("control_lock");
        kernel::lock_holder(&path).map_err(|source| DaemonError::Directory { path, source })
    }

    /// What a container needs before it starts: a daemon that answers, and a way to it. Takes at most
    /// [`READY_WITHIN`]; starts the daemon where the configuration says so.
    ///
    /// # Errors
    /// Why there is no such daemon, and what would help.
    pub fn ready(&self) -> Result<Ready> {
        self.bring_up(self.config.start == Start::OnDemand)
    }

    /// The same for the service and the administrator: starts the daemon whatever the configuration says.
    ///
    /// # Errors
    /// Why there is no such daemon, and what would help.
    pub fn start(&self) -> Result<Ready> {
        self.bring_up(true)
    }

    /// Whether nobody else could have put sockets or files where the daemon's are.
    ///
    /// # Errors
    /// [`DaemonError::NotTrusted`].
    pub fn trusts_its_directories(&self) -> Result<()> {
        directories::trust(&self.layout)
    }

    /// Whether a container that was made ready still is: no command, no lock, no wait.
    ///
    /// # Errors
    /// [`DaemonError::Ended`], [`DaemonError::ClientOutdated`], and directories that are not to be trusted.
    pub fn check(&self) -> Result<()> {
        directories::trust(&self.layout)?;
        if self.process()?.is_none() {
            return Err(DaemonError::Ended { log: self.log() });
        }
        let path = self.layout.client();
        if kernel::same_file(&self.layout.pipe().join("control"), &path.join("control")) {
            Ok(())
        } else {
            Err(DaemonError::ClientOutdated { path })
        }
    }

    /// Ends the daemon with its servers and leaves nothing behind; `false` where none ran.
    ///
    /// Clients are waited for, or ended too after `force_after`. Where they have not gone within `patience`, the
    /// daemon still runs but takes no new ones (`quit` cannot be taken back).
    ///
    /// # Errors
    /// [`DaemonError::StillRunning`], [`ControlError::Busy`], and files that cannot be removed.
    pub fn stop(&self, force_after: Option<Duration>, patience: Duration) -> Result<bool> {
        if !self.layout.state().exists() {
            return Ok(false);
        }
        directories::trust(&self.layout)?;
        let _starting = self.start_lock(Instant::now() + READY_WITHIN)?;
        let ran = self.process()?.is_some();
        if ran {
            self.quit(force_after, patience)?;
        }
        directories::clear_client(&self.layout)?;
        let pipe = self.layout.pipe();
        match fs::remove_dir_all(&pipe) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(DaemonError::Directory { path: pipe, source: error })
            }
            _ => Ok(ran),
        }
    }

    fn quit(&self, force_after: Option<Duration>, patience: Duration) -> Result<()> {
        let begun = Instant::now();
        match self.control()?.quit(force_after, patience) {
            Ok(()) | Err(ControlError::NotThere { .. } | ControlError::Wedged { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let deadline = Instant::now() + ENDING;
        while let Some(pid) = self.process()? {
            if Instant::now() >= deadline {
                return Err(DaemonError::StillRunning { pid, waited: begun.elapsed() });
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn bring_up(&self, may_start: bool) -> Result<Ready> {
        let deadline = Instant::now() + READY_WITHIN;
        directories::trust(&self.layout)?;
        let control = self.control()?;
        let found = match self.process()? {
            Some(_) => Ready::Already,
            None if may_start => self.start_once(&control, deadline)?,
            None => return Err(DaemonError::NotRunning),
        };
        self.make_sure_it_answers(&control.with_patience(control::PATIENCE.min(left(deadline))))?;
        let renewed = self.renew_client(deadline)?;
        let ready = if found == Ready::Already && renewed { Ready::Adopted } else { found };
        match ready {
            Ready::Already => {}
            Ready::Adopted => tracing::info!("adopted the MPS control daemon that was running"),
            Ready::Started => tracing::info!("started the MPS control daemon"),
        }
        Ok(ready)
    }

    /// Asks it something, unless it is known to answer.
    fn make_sure_it_answers(&self, control: &Control) -> Result<()> {
        let memory = self.layout.answered();
        let connections = self.process()?.and_then(Connections::of);
        if connections.as_ref().is_some_and(|connections| connections.are_answered(&memory)) {
            return Ok(());
        }
        control.answers()?;
        if let Some(connections) = connections {
            connections.note_answered(&memory);
        }
        Ok(())
    }

    /// Starts it, unless somebody else did while we waited for our turn.
    fn start_once(&self, control: &Control, deadline: Instant) -> Result<Ready> {
        let pipe = self.layout.pipe();
        if pipe.as_os_str().len() > LONGEST_PIPE_DIRECTORY {
            return Err(DaemonError::PathTooLong { pipe });
        }
        directories::prepare(&self.layout)?;
        let _starting = self.start_lock(deadline)?;
        if self.process()?.is_some() {
            return Ok(Ready::Already);
        }
        let hasty = control.clone().with_patience(control::PATIENCE.min(left(deadline)));
        let multi_user = self.config.multi_user && hasty.abilities()?.multi_user;
        let launch = Launch { program: control.path(), multi_user, layout: &self.layout };
        let (log, is_alive) = (self.log(), || matches!(self.process(), Ok(Some(_))));
        let before = launch::length(&log);
        let latest = deadline.checked_sub(FIRST_ANSWER).unwrap_or(deadline);
        launch.run(&self.host, is_alive, latest).map_err(|why| DaemonError::NotStarted {
            program: control.path().to_owned(),
            why,
            lines: launch::last_lines(&log, before),
            log,
        })?;
        Ok(Ready::Started)
    }

    /// The daemon leaves its lock writable for everybody, so anybody could hold it in a dead daemon's place. It
    /// keeps the file open, and the next one is started by who owns the file.
    fn keep_the_lock_ours(&self) -> Result<()> {
        let path = self.layout.pipe().join("control_lock");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .map_err(|source| DaemonError::Directory { path, source })
    }

    /// Whether the client directory had to be renewed, which has then been done.
    fn renew_client(&self, deadline: Instant) -> Result<bool> {
        if directories::client_is_current(&self.layout) {
            return Ok(false);
        }
        let _starting = self.start_lock(deadline)?;
        if directories::client_is_current(&self.layout) {
            return Ok(false);
        }
        self.keep_the_lock_ours()?;
        directories::renew_client(&self.layout)?;
        Ok(true)
    }

    fn start_lock(&self, deadline: Instant) -> Result<Lock> {
        let path = self.layout.start_lock();
        Lock::acquire(&path, left(deadline)).map_err(|source| match source.kind() {
            io::ErrorKind::TimedOut => DaemonError::StartLocked { path },
            _ => DaemonError::Directory { path, source },
        })
    }

    /// What the daemon itself has to say.
    fn log(&self) -> PathBuf {
        self.layout.logs().join("control.log")
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}
