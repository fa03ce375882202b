//! A stand-in for `nvidia-cuda-mps-control`, for tests only: it shares no GPU and knows no CUDA.
//!
//! It answers as the control daemons of drivers 535, 550 and 580 were seen to answer without a server, and makes
//! the same files in its pipe directory. `tests/control.rs` and `tests/daemon.rs` run the same cases against it and
//! against the real ones. Between its own two halves it speaks a protocol of its own.
//!
//! A file `standin` beside the program chooses how it behaves, one setting a line:
//!
//! ```text
//! version=535      535 (default), 550 or 580: what -h lists, which commands and flags are known
//! mode=hang        accepts every connection and answers none of them
//! mode=die         writes to its log why and ends at once, with status 1
//! delay_ms=300     waits before it is there
//! ```

mod answers;
mod socket;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use std::{env, thread};

use answers::Daemon;
use socket::Socket;

struct Settings {
    version: u32,
    hangs: bool,
    dies: bool,
    delay: Duration,
}

impl Settings {
    fn read() -> Self {
        let beside = env::current_exe().ok().and_then(|program| Some(program.parent()?.join("standin")));
        let text = beside.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let value = |name: &str| {
            text.lines()
                .find_map(|line| line.split_once('=').filter(|(key, _)| *key == name))
                .map(|(_, value)| value)
        };
        let number = |name: &str, other: u32| value(name).map_or(other, |value| value.parse().expect(name));
        Self {
            version: number("version", 535),
            hangs: value("mode") == Some("hang"),
            dies: value("mode") == Some("die"),
            delay: Duration::from_millis(u64::from(number("delay_ms", 0))),
        }
    }
}

fn main() -> ExitCode {
    let settings = Settings::read();
    let pipe = PathBuf::from(env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or("/tmp/nvidia-mps".into()));
    let arguments: Vec<String> = env::args().skip(1).collect();
    let known_flag = |flag: &str| match flag {
        "-d" => true,
        "-M" | "--multiuser-server" => settings.version >= 580,
        _ => false,
    };
    if arguments.iter().any(|argument| argument == "-h" || argument == "--help") {
        print!("{}", answers::help(settings.version));
        return ExitCode::SUCCESS;
    }
    // the real one takes a flag that it does not know for no flag at all, and becomes a client
    if arguments.is_empty() || !arguments.iter().all(|argument| known_flag(argument)) {
        return client(&pipe);
    }
    match start(&settings, &pipe) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            if !message.is_empty() {
                eprintln!("{message}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Reads commands from standard input, one a line, and prints the answers.
fn client(pipe: &Path) -> ExitCode {
    let Some(daemon) =
        ["control_privileged", "control"].into_iter().find_map(|name| Socket::connect(&pipe.join(name)).ok())
    else {
        eprintln!("Cannot find MPS control daemon process");
        return ExitCode::FAILURE;
    };
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { return ExitCode::FAILURE };
        let Some(answer) = daemon.send(line.as_bytes()).ok().and_then(|()| daemon.receive().ok().flatten())
        else {
            return if line.starts_with("quit") { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        };
        // one byte goes before each answer, since an empty packet is the end
        print!("{}", String::from_utf8_lossy(&answer[1..]));
        let _ = io::stdout().flush();
    }
    ExitCode::SUCCESS
}

/// Returns in the parent once the daemon listens, and in the daemon never.
fn start(settings: &Settings, pipe: &Path) -> Result<(), String> {
    // the real one says nothing of it either
    let too_long = pipe.join("control_privileged").as_os_str().len() > 106;
    if too_long {
        return Err(String::new());
    }
    let (mut ready, said) = io::pipe().map_err(|error| error.to_string())?;
    // SAFETY: there is one thread only, so the child may do anything.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error().to_string()),
        0 => {
            drop(ready);
            let message = match serve(settings, pipe, said) {
                Ok(never) => match never {},
                Err(message) => message,
            };
            eprintln!("{message}");
            std::process::exit(1);
        }
        _ => {
            drop(said);
            let mut word = Vec::new();
            io::Read::read_to_end(&mut ready, &mut word).map_err(|error| error.to_string())?;
            if word == b"listening" { Ok(()) } else { Err(String::new()) }
        }
    }
}

enum Never {}

/// The daemon. One connection at a time: who keeps silent keeps everybody waiting, as with the real one.
fn serve(settings: &Settings, pipe: &Path, mut ready: io::PipeWriter) -> Result<Never, String> {
    let words = |error: io::Error| error.to_string();
    // SAFETY: takes no pointers.
    unsafe {
        libc::setsid();
        libc::umask(0);
    }
    thread::sleep(settings.delay);
    fs::create_dir_all(pipe).map_err(words)?;
    let _lock = take_lock(&pipe.join("control_lock"))?;
    let mut log = Log::open();
    log.line("This is a stand-in for tests, not NVIDIA's control daemon");
    log.line(&format!("Starting control daemon using socket {}/control", pipe.display()));
    if settings.dies {
        log.line("Dying at once, as it is set to");
        return Err("set to die".to_owned());
    }
    let privileged = Socket::listen(&pipe.join("control_privileged"), 0o755).map_err(words)?;
    let control = Socket::listen(&pipe.join("control"), 0o666).map_err(words)?;
    make_fifo(&pipe.join("log"));
    if settings.version >= 550 {
        let _ = fs::write(pipe.join("nvidia-cuda-mps-control.pid"), format!("{}\n", std::process::id()));
    }
    let null = File::options().read(true).write(true).open("/dev/null").map_err(words)?;
    for standard in 0..3 {
        // SAFETY: both are open descriptors.
        unsafe { libc::dup2(null.as_raw_fd(), standard) };
    }
    ready.write_all(b"listening").map_err(words)?;
    drop(ready);
    let mut daemon = Daemon::new(settings.version);
    loop {
        let (first, connection) = socket::accept_either(&privileged, &control).map_err(words)?;
        while let Ok(Some(command)) = connection.receive() {
            if settings.hangs {
                continue;
            }
            let command = String::from_utf8_lossy(&command).into_owned();
            log.line(&format!("Cmd:{command}"));
            let answer = daemon.answer(&command, first);
            if daemon.has_quit {
                for name in ["log", "nvidia-cuda-mps-control.pid"] {
                    let _ = fs::remove_file(pipe.join(name));
                }
                log.line("Exit with status 0");
                std::process::exit(0);
            }
            let _ = connection.send(format!(" {answer}").as_bytes());
        }
    }
}

/// Held with `fcntl` until the daemon ends.
fn take_lock(path: &Path) -> Result<File, String> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o666)
        .open(path)
        .map_err(|error| error.to_string())?;
    // SAFETY: all fields of the structure are numbers, for which 0 is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the descriptor is open and the structure outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const lock) } == 0 {
        Ok(file)
    } else {
        Err("An instance of this daemon is already running".to_owned())
    }
}

fn make_fifo(path: &Path) {
    let _ = fs::remove_file(path);
    if let Ok(name) = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()) {
        // SAFETY: the name ends with a zero and outlives the call.
        unsafe { libc::mkfifo(name.as_ptr(), 0o777) };
    }
    let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o777));
}

/// `control.log`, where its directory is there.
struct Log(Option<File>);

impl Log {
    fn open() -> Self {
        let directory =
            PathBuf::from(env::var_os("CUDA_MPS_LOG_DIRECTORY").unwrap_or("/var/log/nvidia-mps".into()));
        Self(File::options().create(true).append(true).open(directory.join("control.log")).ok())
    }

    fn line(&mut self, text: &str) {
        if let Some(file) = &mut self.0 {
            let _ = writeln!(file, "[stand-in {}] {text}", std::process::id());
        }
    }
}
