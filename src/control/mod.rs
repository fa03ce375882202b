//! The control daemon's commands: asked one at a time, with a deadline, and never believed unread.
//!
//! Seen with the daemons of drivers 535, 550 and 580:
//! - commands given at once get each other's answers or none, with status 0: so there is one lock for all of them;
//! - one silent connection to its socket makes it answer nobody: so there is a deadline for each;
//! - what it does not accept it ignores, with status 0: so what was set is read back;
//! - an answer may legitimately be empty, and so is one that was cut short: so every command is followed by a
//!   question whose answer is never empty.

mod command;
mod reply;
mod transport;

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use std::time::{Duration, Instant};

pub use command::{Command, MemoryLimit, Ordinal, Pid};
pub use reply::{Client, DeviceClients, ServerStatus, ShownMemory, ShownPercentage};

use crate::file::Lock;
use crate::layout::{Layout, SYSTEM_PATH, env};
use crate::quantity::{MemoryQuantity, Percentage};
use crate::size::Priority;
use reply::Refusal;
use transport::{Output, RunError};

/// How long one command may take, the wait for its turn included. The daemon answers within a few milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Follows every command: its answer is a number on any daemon, so an answer that does not end with it is not whole.
const LAST_QUESTION: Command = Command::GetDefaultActiveThreadPercentage;

/// What a control program of that version can do, as its `-h` says. (Up to 550 it does not list anything.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// `--multiuser-server`: clients of different users at once.
    pub multi_user: bool,
}

/// The way to one daemon.
#[derive(Clone, Debug)]
pub struct Control {
    program: PathBuf,
    pipe: PathBuf,
    logs: PathBuf,
    lock: PathBuf,
    patience: Duration,
}

/// Why a command was not carried out, or has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The program cannot be run.
    #[error("cannot run {}: {source}", program.display())]
    Program {
        /// The control program.
        program: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The lock that keeps commands apart cannot be taken.
    #[error("cannot take the lock {}: {source}", path.display())]
    Lock {
        /// The lock.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// The others' turns did not end in time.
    #[error(
        "other commands have been waiting for the MPS control daemon for {patience:?}; \
         see who holds {} with 'fuser -v'", path.display()
    )]
    Busy {
        /// The lock.
        path: PathBuf,
        /// How long it was waited for.
        patience: Duration,
    },
    /// Nobody listens.
    #[error("no MPS control daemon listens in {}", pipe.display())]
    NotThere {
        /// The pipe directory.
        pipe: PathBuf,
    },
    /// Somebody listens and does not answer.
    #[error(
        "the MPS control daemon does not answer {command} (waited {patience:?}): it is wedged, mostly by a process \
         that is connected to its socket and keeps silent; see which with 'ss -xp | grep {}/control'", pipe.display()
    )]
    Wedged {
        /// What was asked.
        command: String,
        /// How long it was waited for, the wait for the lock included.
        patience: Duration,
        /// The pipe directory.
        pipe: PathBuf,
    },
    /// The answer is not whole, or there was none.
    #[error("the MPS control daemon broke off its answer to {command}{}", said(message))]
    CutShort {
        /// What was asked.
        command: String,
        /// What the control program said of it.
        message: String,
    },
    /// An older daemon.
    #[error("this version of the MPS control daemon does not know {command}")]
    Unknown {
        /// What was asked.
        command: String,
    },
    /// Asked through the socket that containers have, or as another user.
    #[error("the MPS control daemon does not take {command} from this user: {message}")]
    Privileges {
        /// What was asked.
        command: String,
        /// In the daemon's words.
        message: String,
    },
    /// The server ended, or never was.
    #[error("there is no MPS server {server} any more")]
    NoServer {
        /// Which was named.
        server: Pid,
    },
    /// A setting reads back as something else.
    #[error("the MPS control daemon ignored {command}: it is at {instead:?}")]
    Ignored {
        /// What was to be set.
        command: String,
        /// What is set.
        instead: String,
    },
    /// Another no.
    #[error("the MPS control daemon refused {command}: {message}")]
    Refused {
        /// What was asked.
        command: String,
        /// In the daemon's words.
        message: String,
    },
    /// Words that no known daemon uses here.
    #[error("the MPS control daemon's answer to {command} is not understood: {answer:?}")]
    NotUnderstood {
        /// What was asked.
        command: String,
        /// What came back.
        answer: String,
    },
    /// A server that was to start is not there.
    #[error(
        "the MPS server did not start within {waited:?}; see {}", log.display()
    )]
    NoServerStarted {
        /// How long it was waited for.
        waited: Duration,
        /// Where the daemon and the server log.
        log: PathBuf,
    },
}

/// `: words`, where there are any.
fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

type Result<T> = std::result::Result<T, ControlError>;

impl Control {
    /// The way to the daemon of that layout, through the control program at that absolute path.
    pub fn new(program: &Path, layout: &Layout) -> Self {
        Self {
            program: program.to_owned(),
            pipe: layout.pipe(),
            logs: layout.logs().to_owned(),
            lock: layout.command_lock(),
            patience: PATIENCE,
        }
    }

    /// The control program.
    pub fn path(&self) -> &Path {
        &self.program
    }

    /// The same way with another deadline for each command.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// What this version can do. Asks the program, not the daemon.
    ///
    /// # Errors
    /// Where the program cannot be run or does not end.
    pub fn abilities(&self) -> Result<Abilities> {
        let deadline = Instant::now() + self.patience;
        let output = transport::run(self.program().arg("-h"), b"", deadline)
            .map_err(|error| self.explain(error, "-h"))?;
        Ok(Abilities { multi_user: output.stdout.contains("--multiuser-server") })
    }

    /// Whether the daemon answers at all.
    ///
    /// # Errors
    /// [`ControlError::NotThere`], [`ControlError::Wedged`], [`ControlError::Busy`] and what else keeps it from it.
    pub fn answers(&self) -> Result<()> {
        self.default_thread_percentage().map(drop)
    }

    /// The servers. There is at most one, but for each user's while they change over.
    ///
    /// # Errors
    /// As every command: no daemon, a wedged one, an answer that is not whole.
    pub fn server_list(&self) -> Result<Vec<Pid>> {
        self.ask_for(Command::GetServerList, reply::pids)
    }

    /// How a server is.
    ///
    /// # Errors
    /// As every command, and [`ControlError::Unknown`] before driver 550.
    pub fn server_status(&self, server: Pid) -> Result<ServerStatus> {
        self.ask_for(Command::GetServerStatus(server), reply::status)
    }

    /// The clients of a server by number. One that was terminated stays until its process ends.
    ///
    /// # Errors
    /// As every command.
    pub fn client_list(&self, server: Pid) -> Result<Vec<Pid>> {
        self.ask_for(Command::GetClientList(server), reply::pids)
    }

    /// The GPUs of one server or of all, each with its clients.
    ///
    /// # Errors
    /// As every command.
    pub fn device_client_list(&self, server: Option<Pid>) -> Result<Vec<DeviceClients>> {
        self.ask_for(Command::GetDeviceClientList(server), reply::device_clients)
    }

    /// The clients of one server or of all, in their own words: see [`Client`].
    ///
    /// # Errors
    /// As every command.
    pub fn clients(&self, server: Option<Pid>) -> Result<Vec<Client>> {
        match self.ask_for(Command::Ps(server), reply::clients) {
            // without a server there is no client
            Err(ControlError::Refused { message, .. }) if message == "Server not found" => Ok(Vec::new()),
            other => other,
        }
    }

    /// Starts a server for a user and waits until one serves: the first client is then spared 250 ms.
    ///
    /// Where a server of another user runs and clients of several users are not taken at once, that one stays.
    ///
    /// # Errors
    /// As every command, and [`ControlError::NoServerStarted`]: the daemon itself does not say so.
    pub fn start_server(&self, uid: u32) -> Result<Vec<Pid>> {
        let begun = Instant::now();
        self.carry_out(&[Command::StartServer { uid }])?;
        loop {
            let servers = self.server_list()?;
            if servers.iter().any(|server| self.serves(*server)) {
                return Ok(servers);
            }
            if begun.elapsed() >= self.patience {
                let log = self.logs.join("server.log");
                return Err(ControlError::NoServerStarted { waited: self.patience, log });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Whether a server that was listed takes clients, as far as the daemon can say.
    fn serves(&self, server: Pid) -> bool {
        matches!(self.server_status(server), Ok(ServerStatus::Active) | Err(ControlError::Unknown { .. }))
    }

    /// Ends a server, once its clients are gone or at once. It may still be listed for a moment.
    ///
    /// # Errors
    /// As every command.
    pub fn shutdown_server(&self, server: Pid, force: bool) -> Result<()> {
        self.carry_out(&[Command::ShutdownServer { server, force }]).map(drop)
    }

    /// Takes the GPU away from one client: its next call fails with 810, its neighbours go on (10 ms).
    ///
    /// # Errors
    /// As every command, and [`ControlError::Refused`] with CUDA's number where there is no such client.
    pub fn terminate_client(&self, server: Pid, client: Pid) -> Result<()> {
        let command = Command::TerminateClient { server, client };
        match self.ask_for(command, reply::code)? {
            0 => Ok(()),
            code => {
                let message = format!("error {code}, mostly because process {client} is no client of it");
                Err(ControlError::Refused { command: command.to_string(), message })
            }
        }
    }

    /// The thread percentage of the next server.
    ///
    /// # Errors
    /// As every command.
    pub fn default_thread_percentage(&self) -> Result<ShownPercentage> {
        let text = self.exchange(&[])?;
        match reply::before_last(&text) {
            Some(("", percentage)) => Ok(percentage),
            _ => Err(not_understood(LAST_QUESTION, &text)),
        }
    }

    /// Sets the thread percentage of the next server. (A server that runs keeps its own.)
    ///
    /// # Errors
    /// As every command, and [`ControlError::Ignored`].
    pub fn set_default_thread_percentage(&self, percentage: Percentage) -> Result<()> {
        let command = Command::SetDefaultActiveThreadPercentage(percentage);
        let text = self.carry_out(&[command, Command::GetDefaultActiveThreadPercentage])?;
        check_percentage(command, &text, percentage)
    }

    /// The thread percentage of a server's next clients.
    ///
    /// # Errors
    /// As every command.
    pub fn thread_percentage(&self, server: Pid) -> Result<ShownPercentage> {
        self.ask_for(Command::GetActiveThreadPercentage(server), reply::percentage)
    }

    /// Sets the thread percentage of a server's next clients.
    ///
    /// # Errors
    /// As every command, and [`ControlError::Ignored`].
    pub fn set_thread_percentage(&self, server: Pid, percentage: Percentage) -> Result<()> {
        let command = Command::SetActiveThreadPercentage(server, percentage);
        let text = self.carry_out(&[command, Command::GetActiveThreadPercentage(server)])?;
        check_percentage(command, &text, percentage)
    }

    /// The memory limit of the next server, where there is one.
    ///
    /// # Errors
    /// As every command.
    pub fn default_memory_limit(&self, gpu: Ordinal) -> Result<Option<ShownMemory>> {
        let command = Command::GetDefaultDevicePinnedMemLimit(gpu);
        read_memory(command, &self.carry_out(&[command])?)
    }

    /// Sets the memory limit of the next server, or clears it.
    ///
    /// # Errors
    /// As every command, and [`ControlError::Ignored`].
    pub fn set_default_memory_limit(&self, gpu: Ordinal, limit: Option<MemoryLimit>) -> Result<()> {
        let command = Command::SetDefaultDevicePinnedMemLimit(gpu, limit);
        let text = self.carry_out(&[command, Command::GetDefaultDevicePinnedMemLimit(gpu)])?;
        check_memory(command, &text, limit)
    }

    /// The memory limit of a server's next clients, where there is one.
    ///
    /// # Errors
    /// As every command.
    pub fn memory_limit(&self, server: Pid, gpu: Ordinal) -> Result<Option<ShownMemory>> {
        let command = Command::GetDevicePinnedMemLimit(server, gpu);
        read_memory(command, &self.carry_out(&[command])?)
    }

    /// Sets the memory limit of a server's next clients.
    ///
    /// # Errors
    /// As every command, and [`ControlError::Ignored`].
    pub fn set_memory_limit(&self, server: Pid, gpu: Ordinal, limit: MemoryLimit) -> Result<()> {
        let command = Command::SetDevicePinnedMemLimit(server, gpu, limit);
        let text = self.carry_out(&[command, Command::GetDevicePinnedMemLimit(server, gpu)])?;
        check_memory(command, &text, Some(limit))
    }

    /// The priority of clients that do not ask for one.
    ///
    /// # Errors
    /// As every command.
    pub fn default_priority(&self) -> Result<Priority> {
        self.ask_for(Command::GetDefaultClientPriority, reply::priority)
    }

    /// Sets the priority of clients that do not ask for one.
    ///
    /// # Errors
    /// As every command, and [`ControlError::Ignored`].
    pub fn set_default_priority(&self, priority: Priority) -> Result<()> {
        let command = Command::SetDefaultClientPriority(priority);
        let text = self.carry_out(&[command, Command::GetDefaultClientPriority])?;
        if reply::priority(&text) == Some(priority) { Ok(()) } else { Err(ignored(command, &text)) }
    }

    /// Asks the daemon to end and waits until the control program says that it did, but not beyond `patience`.
    ///
    /// The program's status is no measure (535 gives 1 where 550 gives 0): look whether the daemon still lives.
    ///
    /// # Errors
    /// As every command; [`ControlError::Wedged`] also where clients keep it from ending.
    pub fn quit(&self, force_after: Option<Duration>, patience: Duration) -> Result<()> {
        // whole seconds, and at least one: nobody has seen what 0 does
        let force_after = force_after
            .map(|after| u32::try_from(after.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1));
        let command = Command::Quit { force_after };
        let this = self.clone().with_patience(patience);
        let output = this.send(&format!("{command}\n"), command)?;
        check_refusal(&output.stdout, command)
    }

    /// One question, and its answer understood.
    fn ask_for<T>(&self, command: Command, understand: impl Fn(&str) -> Option<T>) -> Result<T> {
        let text = self.carry_out(&[command])?;
        understand(&text).ok_or_else(|| not_understood(command, &text))
    }

    /// Commands in one go, and what came back before the last question's answer.
    fn carry_out(&self, commands: &[Command]) -> Result<String> {
        let text = self.exchange(commands)?;
        let first = commands.first().copied().unwrap_or(LAST_QUESTION);
        let Some((before, _)) = reply::before_last(&text) else {
            let message = text.lines().last().unwrap_or_default().to_owned();
            return Err(ControlError::CutShort { command: first.to_string(), message });
        };
        check_refusal(before, first)?;
        Ok(before.to_owned())
    }

    /// Commands and the last question, and all that came back.
    fn exchange(&self, commands: &[Command]) -> Result<String> {
        let first = commands.first().copied().unwrap_or(LAST_QUESTION);
        let mut lines = String::new();
        for command in commands.iter().chain([&LAST_QUESTION]) {
            lines.extend([command.to_string().as_str(), "\n"]);
        }
        let output = self.send(&lines, first)?;
        if output.status.success() && !output.stdout.is_empty() {
            return Ok(output.stdout);
        }
        let message = output.stderr.trim_end().to_owned();
        Err(ControlError::CutShort { command: first.to_string(), message })
    }

    /// Gives the lines to the control program when it is their turn.
    fn send(&self, lines: &str, command: Command) -> Result<Output> {
        let deadline = Instant::now() + self.patience;
        let turn = Lock::acquire(&self.lock, self.patience).map_err(|source| self.no_turn(source))?;
        let result = transport::run(&mut self.program(), lines.as_bytes(), deadline);
        drop(turn);
        let output = result.map_err(|error| self.explain(error, &command.to_string()))?;
        let missing = ["Cannot find MPS control daemon", "Cannot access CUDA_MPS_PIPE_DIRECTORY"];
        if missing.iter().any(|words| output.stderr.contains(words)) {
            return Err(ControlError::NotThere { pipe: self.pipe.clone() });
        }
        Ok(output)
    }

    /// The control program, with nothing of our environment.
    fn program(&self) -> Program {
        let mut program = Program::new(&self.program);
        program
            .env_clear()
            .env(env::PIPE_DIRECTORY, &self.pipe)
            .env(env::LOG_DIRECTORY, &self.logs)
            .env("PATH", SYSTEM_PATH);
        program
    }

    fn no_turn(&self, source: io::Error) -> ControlError {
        let path = self.lock.clone();
        if source.kind() == io::ErrorKind::TimedOut {
            ControlError::Busy { path, patience: self.patience }
        } else {
            ControlError::Lock { path, source }
        }
    }

    fn explain(&self, error: RunError, command: &str) -> ControlError {
        match error {
            RunError::Spawn(source) | RunError::Read(source) => {
                ControlError::Program { program: self.program.clone(), source }
            }
            RunError::TimedOut => ControlError::Wedged {
                command: command.to_owned(),
                patience: self.patience,
                pipe: self.pipe.clone(),
            },
        }
    }
}

fn check_refusal(answer: &str, command: Command) -> Result<()> {
    let written = command.to_string();
    match reply::refusal(answer) {
        None => Ok(()),
        Some(Refusal::UnknownCommand) => Err(ControlError::Unknown { command: command.name() }),
        Some(Refusal::Privileges(message)) => {
            Err(ControlError::Privileges { command: command.name(), message })
        }
        Some(Refusal::NoServer(server)) => Err(no_server(command, server)),
        Some(Refusal::Other(message)) => Err(ControlError::Refused { command: written, message }),
    }
}

fn not_understood(command: Command, answer: &str) -> ControlError {
    ControlError::NotUnderstood { command: command.to_string(), answer: answer.trim_end().to_owned() }
}

fn ignored(command: Command, answer: &str) -> ControlError {
    let instead = answer.lines().last().unwrap_or("no value").to_owned();
    ControlError::Ignored { command: command.to_string(), instead }
}

fn no_server(command: Command, named: Option<u32>) -> ControlError {
    match named.and_then(|server| Pid::try_from(server).ok()) {
        Some(server) => ControlError::NoServer { server },
        None => {
            ControlError::Refused { command: command.to_string(), message: "Server not found".to_owned() }
        }
    }
}

/// The setting's own answer may come first: what counts is what was read back behind it.
fn check_percentage(command: Command, answer: &str, percentage: Percentage) -> Result<()> {
    let shown = answer.lines().last().and_then(reply::percentage);
    if shown.is_some_and(|shown| shown.shows(percentage)) { Ok(()) } else { Err(ignored(command, answer)) }
}

/// Nothing is shown where there is no limit.
fn read_memory(command: Command, answer: &str) -> Result<Option<ShownMemory>> {
    if answer.trim().is_empty() {
        return Ok(None);
    }
    reply::memory(answer).map(Some).ok_or_else(|| not_understood(command, answer))
}

fn check_memory(command: Command, answer: &str, limit: Option<MemoryLimit>) -> Result<()> {
    let shown = read_memory(command, answer)?;
    let asked: Option<MemoryQuantity> = limit.map(MemoryLimit::memory);
    let right = match (shown, asked) {
        (None, None) => true,
        (Some(shown), Some(asked)) => shown.shows(asked),
        _ => false,
    };
    if right { Ok(()) } else { Err(ignored(command, answer)) }
}
