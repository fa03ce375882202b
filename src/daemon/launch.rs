//! The daemon's start: a process that owes nothing to whoever needed it first.
//!
//! That is mostly the hook of some container, and when that container ends its engine ends what is left in its
//! session and cgroup. So the daemon gets a session, a cgroup and an environment of its own, and no open files.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{Uid, setsid};

use super::cgroup;
use super::program::Host;
use crate::layout::{Layout, Owner, SYSTEM_PATH, env};

/// Each client takes several descriptors of the server, which has the daemon's limit; 1024 end before 48 clients do.
const DESCRIPTORS: u64 = 16_384;

/// How long a daemon may take from its parent's success to being seen.
const SETTLING: Duration = Duration::from_millis(200);

/// What is to be started.
pub(super) struct Launch<'a> {
    pub(super) program: &'a Path,
    pub(super) multi_user: bool,
    pub(super) layout: &'a Layout,
}

/// Why nothing runs, in words that end a sentence.
pub(super) type Why = String;

impl Launch<'_> {
    /// Starts the daemon and waits until `is_alive`, but not beyond `deadline`.
    pub(super) fn run(&self, host: &Host, is_alive: impl Fn() -> bool, deadline: Instant) -> Result<(), Why> {
        let (name, mut command) = self.command(host);
        // a file, since a pipe would have to be read while the daemon holds it
        let mut output = tempfile::tempfile_in(self.layout.state()).map_err(|error| error.to_string())?;
        let handle = |file: &File| file.try_clone().map(Stdio::from).map_err(|error| error.to_string());
        command.stdin(Stdio::null()).stdout(handle(&output)?).stderr(handle(&output)?);
        let mut child = command.spawn().map_err(|error| format!("{name} cannot be run: {error}"))?;
        let result = wait(&mut child, is_alive, deadline);
        if result.is_err() {
            // both fail only where it was already reaped
            let _ = child.kill();
            let _ = child.wait();
        }
        result.map_err(|why| format!("{name} {why}{}", said(&mut output)))
    }

    fn arguments(&self) -> impl Iterator<Item = &'static str> + use<> {
        ["-d"].into_iter().chain(self.multi_user.then_some("--multiuser-server"))
    }

    /// All that the daemon, and with it every server, has of an environment.
    fn environment(&self) -> [(&'static str, OsString); 4] {
        let mut path = self.program.parent().unwrap_or(Path::new("/")).as_os_str().to_owned();
        path.push(":");
        path.push(SYSTEM_PATH);
        [
            (env::PIPE_DIRECTORY, self.layout.pipe().into()),
            (env::LOG_DIRECTORY, self.layout.logs().into()),
            // the ordinals of limits are then the indices that NVML counts by
            ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".into()),
            // the daemon looks its server up there
            ("PATH", path),
        ]
    }

    /// What to run, and its name for a message.
    fn command(&self, host: &Host) -> (&'static str, Command) {
        match self.systemd_run(host) {
            Some(command) => ("systemd-run", command),
            None => ("it", self.direct()),
        }
    }

    /// As a unit of its own, where systemd manages us.
    fn systemd_run(&self, host: &Host) -> Option<Command> {
        if !host.systemd_runs.is_dir() {
            return None;
        }
        let mut command = Command::new(host.find(Path::new("systemd-run"))?);
        command.env_clear().env("PATH", SYSTEM_PATH).current_dir("/");
        if let Owner::User(uid) = host.owner {
            // user 0 of a user namespace is not whom the user's manager takes commands from
            let runtime = PathBuf::from(format!("/run/user/{uid}"));
            if Uid::effective().as_raw() != uid || !runtime.join("systemd").is_dir() {
                return None;
            }
            command.arg("--user").env("XDG_RUNTIME_DIR", runtime);
        }
        command
            .args(["--quiet", "--collect", "--service-type=forking"])
            .arg(format!("--unit={}", self.unit(host.owner)))
            .arg("--description=NVIDIA MPS control daemon, started by oci-mps for a container")
            .arg(format!("--property=LimitNOFILE={DESCRIPTORS}"));
        for (name, value) in self.environment() {
            let mut setting = OsString::from(format!("--setenv={name}="));
            setting.push(value);
            command.arg(setting);
        }
        command.arg("--").arg(self.program).args(self.arguments());
        Some(command)
    }

    /// `oci-mps-daemon`; another instance has the name of its state directory behind it.
    fn unit(&self, owner: Owner) -> String {
        let state = self.layout.state();
        if state == Layout::new(owner, |_| None).state() {
            return "oci-mps-daemon".to_owned();
        }
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
        format!("oci-mps-daemon{}", state.to_string_lossy().chars().map(plain).collect::<String>())
    }

    /// As a child that leaves us.
    fn direct(&self) -> Command {
        let mut command = Command::new(self.program);
        command.args(self.arguments()).env_clear().envs(self.environment()).current_dir("/");
        let exits = cgroup::exits();
        // SAFETY: `leave` allocates nothing, takes no lock and makes only system calls, so it is safe between fork
        // and exec, whatever other threads were doing at the fork.
        unsafe {
            command.pre_exec(move || leave(&exits));
        }
        command
    }
}

/// Leaves session, cgroups, umask and open files behind; runs in the child, just before it becomes the daemon.
fn leave(exits: &[File]) -> io::Result<()> {
    setsid()?;
    umask(Mode::from_bits_truncate(0o022));
    for mut exit in exits {
        // best effort: a hierarchy that cannot be left, as in a container, is no reason not to start
        let _ = exit.write(b"0");
    }
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let wanted = DESCRIPTORS.min(hard);
        if soft < wanted {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, wanted, hard);
        }
    }
    close_on_exec_from_3();
    Ok(())
}

/// Marks every descriptor but the standard ones. They stay open until the exec, since one of them reports its failure.
fn close_on_exec_from_3() {
    // SAFETY: takes no pointers, and closes nothing yet.
    let done = unsafe {
        libc::syscall(libc::SYS_close_range, 3 as libc::c_uint, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    if done == 0 {
        return;
    }
    // before Linux 5.11: as far as descriptors are likely to go
    for descriptor in 3..4096 {
        // SAFETY: takes no pointers; a descriptor that is not open is an error without effect.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Waits for the child to have started a daemon.
fn wait(child: &mut Child, is_alive: impl Fn() -> bool, deadline: Instant) -> Result<(), Why> {
    let begun = Instant::now();
    let mut pause = Duration::from_millis(1);
    let mut deadline = deadline;
    let mut ended = false;
    loop {
        if !ended && let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            if !status.success() && !is_alive() {
                return Err(format!("ended with {status}"));
            }
            ended = true;
            deadline = deadline.min(Instant::now() + SETTLING);
        }
        if ended && is_alive() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let what = if ended { "left no daemon behind" } else { "did not finish" };
            return Err(format!("{what} within {:.1} s", begun.elapsed().as_secs_f32()));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// What it wrote to its standard output, for the end of a sentence.
fn said(output: &mut File) -> String {
    let mut text = Vec::new();
    let read = output.rewind().and_then(|()| output.take(2048).read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    match text.trim() {
        words if read.is_ok() && !words.is_empty() => format!(" and said: {words}"),
        _ => String::new(),
    }
}

/// How long a file is, 0 where there is none.
pub(super) fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |file| file.len())
}

/// The last lines that were written behind `from`, each indented on a line of its own.
pub(super) fn last_lines(log: &Path, from: u64) -> String {
    const LINES: usize = 6;
    const LONGEST: u64 = 4096;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let end = file.metadata()?.len();
        file.seek(io::SeekFrom::Start(from.max(end.saturating_sub(LONGEST))))?;
        let mut bytes = Vec::new();
        file.take(LONGEST).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].iter().flat_map(|line| ["\n  ", line]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    fn layout(state: &str) -> Layout {
        Layout::new(Owner::Root, |name| (name == env::STATE_DIR).then(|| state.into()))
    }

    fn launch(layout: &Layout) -> Launch<'_> {
        Launch { program: Path::new("/opt/nvidia/bin/nvidia-cuda-mps-control"), multi_user: true, layout }
    }

    fn host(directory: &Path, owner: Owner) -> Host {
        let program = directory.join("systemd-run");
        std::fs::write(&program, "").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        Host { program_directories: vec![directory.to_owned()], systemd_runs: directory.to_owned(), owner }
    }

    #[test]
    fn under_systemd_it_is_a_unit_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let layout = Layout::new(Owner::Root, |_| None);
        let (name, command) = launch(&layout).command(&host(directory.path(), Owner::Root));
        let arguments: Vec<&OsStr> = command.get_args().collect();
        assert_eq!(
            (name, command.get_program()),
            ("systemd-run", directory.path().join("systemd-run").as_os_str())
        );
        assert!(arguments.contains(&OsStr::new("--unit=oci-mps-daemon")), "{arguments:?}");
        assert!(arguments.contains(&OsStr::new("--setenv=CUDA_MPS_PIPE_DIRECTORY=/run/oci-mps/pipe")));
        assert!(arguments.ends_with(&[
            OsStr::new("--"),
            OsStr::new("/opt/nvidia/bin/nvidia-cuda-mps-control"),
            OsStr::new("-d"),
            OsStr::new("--multiuser-server"),
        ]));
    }

    #[test]
    fn a_namespace_root_does_not_ask_the_users_systemd() {
        let directory = tempfile::tempdir().unwrap();
        let nobody = Owner::User(Uid::effective().as_raw() + 1);
        let layout = layout("/srv/two");
        assert_eq!(launch(&layout).command(&host(directory.path(), nobody)).0, "it");
    }

    #[test]
    fn instances_have_units_of_their_own() {
        assert_eq!(launch(&layout("/srv/two")).unit(Owner::Root), "oci-mps-daemon-srv-two");
        let users = Layout::new(Owner::User(1000), |_| None);
        assert_eq!(launch(&users).unit(Owner::User(1000)), "oci-mps-daemon");
    }

    #[test]
    fn only_the_last_lines_of_this_start_are_shown() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "before\n1\n2\n\n3\n4\n5\n6\n7\n").unwrap();
        assert_eq!(last_lines(log.path(), 7), "\n  2\n  3\n  4\n  5\n  6\n  7");
        assert_eq!(last_lines(log.path(), 1000), "");
        assert_eq!(last_lines(Path::new("/nonexistent"), 0), "");
    }
}
