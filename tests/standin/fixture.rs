//! What the suites `control` and `daemon` stand on: the daemons that they run against, each test's own instance, and
//! an end for whatever it started.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libtest_mimic::{Completion, Failed, Trial};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use oci_mps::config;
use oci_mps::control::Control;
use oci_mps::daemon::{Daemon, Host};
use oci_mps::kernel;
use oci_mps::layout::{Layout, Owner, env};
use tempfile::TempDir;

/// A control program to test with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// NVIDIA's, of that driver.
    Real(u32),
    /// Ours, which behaves as that driver's.
    StandIn(u32),
}

impl Kind {
    pub(crate) const ALL: [Self; 6] = [
        Self::Real(535),
        Self::Real(550),
        Self::Real(580),
        Self::StandIn(535),
        Self::StandIn(550),
        Self::StandIn(580),
    ];

    pub(crate) fn version(self) -> u32 {
        match self {
            Self::Real(version) | Self::StandIn(version) => version,
        }
    }

    /// Whether a server of it can live here.
    pub(crate) fn has_gpu(self) -> bool {
        matches!(self, Self::Real(_)) && Path::new("/proc/driver/nvidia/version").exists()
    }

    pub(crate) fn name(self) -> String {
        match self {
            Self::Real(version) => format!("real {version}"),
            Self::StandIn(version) => format!("stand-in {version}"),
        }
    }

    /// The program, or why it is not to be had.
    pub(crate) fn program(self) -> Result<PathBuf, String> {
        match self {
            Self::StandIn(_) => stand_in(),
            Self::Real(version) => real(version),
        }
    }
}

/// A trial for each kind; one whose program is missing is ignored and says why.
pub(crate) fn with_each(
    kinds: &[Kind],
    case: &'static str,
    test: impl Fn(Instance) -> Result<(), Failed> + Copy + Send + 'static,
) -> Vec<Trial> {
    let trial = |kind: Kind| {
        Trial::ignorable_test(format!("{case} ({})", kind.name()), move || match kind.program() {
            Err(reason) => Ok(Completion::ignored_with(reason)),
            Ok(program) => test(Instance::new(kind, &program)).map(|()| Completion::Completed),
        })
    };
    kinds.iter().map(|kind| trial(*kind)).collect()
}

/// A state directory of its own, and a way to the program. Whatever runs in it is killed at its end.
pub(crate) struct Instance {
    pub(crate) kind: Kind,
    pub(crate) directory: TempDir,
    pub(crate) program: PathBuf,
    pub(crate) layout: Layout,
    pub(crate) config: config::Daemon,
    pub(crate) host: Host,
}

impl Instance {
    pub(crate) fn new(kind: Kind, program: &Path) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let state = directory.path().join("state");
        let layout = Layout::new(Owner::Root, |name| (name == env::STATE_DIR).then(|| state.clone().into()));
        let mut program = program.to_owned();
        if let Kind::StandIn(_) = kind {
            // a copy, so that the settings beside it are this test's alone
            let own = directory.path().join("nvidia-cuda-mps-control");
            copy(&program, &own);
            program = own;
        }
        let config = config::Daemon { control: program.clone(), ..config::Daemon::default() };
        let host = Host { systemd_runs: PathBuf::from("/nonexistent"), ..Host::default() };
        let instance = Self { kind, directory, program, layout, config, host };
        instance.settings("");
        instance
    }

    /// How the stand-in behaves from its next start on.
    pub(crate) fn settings(&self, settings: &str) {
        if let Kind::StandIn(version) = self.kind {
            let text = format!("version={version}\n{settings}\n");
            fs::write(self.directory.path().join("standin"), text).expect("settings");
        }
    }

    pub(crate) fn daemon(&self) -> Daemon {
        Daemon::on(self.host.clone(), &self.layout, &self.config)
    }

    /// Patient, since the machine may be busy with other tests.
    pub(crate) fn control(&self) -> Control {
        Control::new(&self.program, &self.layout).with_patience(Duration::from_secs(60))
    }

    /// The daemon, started as an administrator would by hand.
    pub(crate) fn start_by_hand(&self) {
        fs::create_dir_all(self.layout.logs()).expect("a log directory");
        let status = self.by_hand(&self.layout.pipe()).arg("-d").status().expect("the program");
        assert!(status.success(), "{status}");
    }

    /// The control program, with that pipe directory.
    pub(crate) fn by_hand(&self, pipe: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().env(env::PIPE_DIRECTORY, pipe).env(env::LOG_DIRECTORY, self.layout.logs());
        command
    }

    pub(crate) fn kill(&self) {
        let lock = self.layout.pipe().join("control_lock");
        while let Ok(Some(pid @ 1..)) = kernel::lock_holder(&lock) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// All daemons that were ever started with this instance's pipe directory and still run.
    pub(crate) fn daemons(&self) -> Vec<i32> {
        let variable = format!("{}={}", env::PIPE_DIRECTORY, self.layout.pipe().display());
        let ours = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
        };
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(ours).collect()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.kill();
        for pid in self.daemons() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Copies a program. By another process: were the copy open for writing here while another test's thread forks, it
/// could not be executed until that child is gone (`ETXTBSY`).
pub(crate) fn copy(from: &Path, to: &Path) {
    let status = Command::new("cp").arg(from).arg(to).status().expect("cp");
    assert!(status.success(), "cp {} {}: {status}", from.display(), to.display());
}

/// The stand-in, built once. Nothing that is shipped holds it, so nothing but these tests builds it.
fn stand_in() -> Result<PathBuf, String> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT.get_or_init(build_stand_in).clone()
}

fn build_stand_in() -> Result<PathBuf, String> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/standin/Cargo.toml");
    // …/debug/deps/control-0123456789abcdef
    let profile = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = profile.ancestors().nth(3).ok_or("where was this built?")?.join("standin");
    let output = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--offline", "--manifest-path", manifest, "--target-dir"])
        .arg(&target)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(target.join("debug/nvidia-cuda-mps-control"))
    } else {
        Err(format!("the stand-in does not build: {}", String::from_utf8_lossy(&output.stderr)))
    }
}

/// What `tests/engines/prepare` found, or the variable `MPS_CONTROL_535` names.
fn real(version: u32) -> Result<PathBuf, String> {
    let key = format!("MPS_CONTROL_{version}");
    if let Some(path) = std::env::var_os(&key) {
        return Ok(PathBuf::from(path));
    }
    let written = prepared();
    match (written.get(&key), written.get(&format!("MISSING_{key}"))) {
        (Some(path), _) => Ok(PathBuf::from(path)),
        (None, Some(reason)) => Err(format!("no control daemon of driver {version}: {reason}")),
        (None, None) => Err(format!(
            "no control daemon of driver {version}: run tests/engines/prepare, or name it with {key}"
        )),
    }
}

fn prepared() -> BTreeMap<String, String> {
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/oci-mps/engines"));
    let directory = std::env::var_os("OCI_MPS_ENGINES").map(PathBuf::from).or_else(home).unwrap_or_default();
    let text = fs::read_to_string(directory.join("env")).unwrap_or_default();
    text.lines().filter_map(|line| line.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// What a case says when something is not as it should be.
pub(crate) fn check(holds: bool, what: impl std::fmt::Display) -> Result<(), Failed> {
    if holds { Ok(()) } else { Err(what.to_string().into()) }
}

/// Runs something that must end within that many seconds.
pub(crate) fn within<T>(seconds: f32, run: impl FnOnce() -> T) -> Result<T, Failed> {
    let begun = Instant::now();
    let result = run();
    let taken = begun.elapsed().as_secs_f32();
    check(taken <= seconds, format!("took {taken:.2} s, not {seconds}")).map(|()| result)
}
