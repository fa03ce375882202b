//! A host of oci-mps of our own: state, configuration, simulated GPUs, and the real control daemon, which the first
//! container starts.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::machine::{MACHINE, program};
use crate::processes;

/// The GPUs that the inventory file pretends to have. The third is cut into MIG devices.
pub(crate) const GPUS: [&str; 3] = [
    "GPU-00000000-1111-2222-3333-444444444444",
    "GPU-11111111-1111-2222-3333-444444444444",
    "GPU-11111111-5555-2222-3333-444444444444",
];

/// Whose control daemon it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Driver {
    D535,
    /// The default: from here on the daemon refuses containers its settings.
    #[default]
    D550,
}

/// What is written into the configuration besides what every test needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings<'a> {
    pub(crate) driver: Driver,
    /// `[daemon] control`, where it is not the real one.
    pub(crate) control: Option<PathBuf>,
    /// `[daemon] start = "service"`
    pub(crate) service: bool,
    /// Further sections.
    pub(crate) more: &'a str,
}

pub(crate) struct Host {
    directory: TempDir,
    /// Where the programs are, readable by every user.
    programs: PathBuf,
    runtime: &'static str,
    /// For whom, where it is not root.
    user: Option<u32>,
}

impl Host {
    pub(crate) fn new() -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("oci-mps-engines.")
            .permissions(fs::Permissions::from_mode(0o755))
            .tempdir()
            .context("making the directory of a test host")?;
        let host =
            Self { programs: directory.path().join("programs"), directory, runtime: "runc", user: None };
        fs::create_dir(host.home())?;
        host.install()?;
        host.write_gpus()?;
        host.fresh()?;
        Ok(host)
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.home().join("state")
    }

    /// What belongs to whom this instance of oci-mps works for.
    fn home(&self) -> PathBuf {
        self.path().join("instance")
    }

    /// Works for an ordinary user instead of for root.
    pub(crate) fn belong_to(&mut self, user: u32) -> Result<()> {
        self.user = Some(user);
        chown(self.home(), Some(user), Some(user)).context("giving an instance to its user")
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.path().join("config.toml")
    }

    pub(crate) fn gpus(&self) -> PathBuf {
        self.path().join("gpus.toml")
    }

    /// A name that nothing else on this machine has: of the engine's namespace, and of its cgroup.
    pub(crate) fn name(&self) -> String {
        let name = self.path().file_name().expect("a directory has a name").to_string_lossy();
        name.replace('.', "-")
    }

    /// What every program of oci-mps is told.
    pub(crate) fn variables(&self) -> [(&'static str, PathBuf); 2] {
        [("OCI_MPS_STATE_DIR", self.state()), ("OCI_MPS_CONFIG", self.config())]
    }

    /// As if the machine had just been installed: no daemon, no state, the default settings, nothing recorded.
    pub(crate) fn fresh(&self) -> Result<()> {
        self.end_daemon();
        let state = self.state();
        let _ = fs::set_permissions(&state, fs::Permissions::from_mode(0o755));
        if state.exists() {
            fs::remove_dir_all(&state).with_context(|| format!("removing {}", state.display()))?;
        }
        self.mend()?;
        self.forget()
    }

    /// The settings as they are by default, whatever a test made of them.
    pub(crate) fn mend(&self) -> Result<()> {
        self.configure(&Settings::default());
        self.write_gpus()
    }

    /// Forgets what the low-level runtime was given.
    pub(crate) fn forget(&self) -> Result<()> {
        let seen = self.path().join("seen");
        let _ = fs::remove_dir_all(&seen);
        fs::create_dir(&seen).context("making the place for recorded specs")?;
        // a rootless engine records as its user
        fs::set_permissions(&seen, fs::Permissions::from_mode(0o1777))?;
        Ok(())
    }

    pub(crate) fn configure(&self, settings: &Settings<'_>) {
        let control = settings.control.clone().unwrap_or_else(|| self.control_program(settings.driver));
        let start = if settings.service { "service" } else { "on-demand" };
        let text = format!(
            "[runtime]\npath = '{}'\n[daemon]\ncontrol = '{}'\nstart = '{start}'\n\
             [inventory]\nsource = 'file'\nfile = '{}'\n{}",
            self.runtime().display(),
            control.display(),
            self.gpus().display(),
            settings.more,
        );
        let config = self.config();
        let _ = fs::remove_dir(&config);
        fs::write(&config, text).unwrap_or_else(|error| panic!("writing the configuration: {error}"));
    }

    fn write_gpus(&self) -> Result<()> {
        let gpu = |(index, uuid): (usize, &&str)| {
            format!(
                "[[gpu]]\nindex = {index}\nuuid = {uuid:?}\nname = \"NVIDIA H200\"\nmemory_mib = 143771\n\
                 compute_capability = \"9.0\"\nsms = 132\nmig = {}\n",
                index == 2
            )
        };
        let text: String = GPUS.iter().enumerate().map(gpu).collect();
        fs::write(self.gpus(), text).context("writing the inventory")
    }

    /// Our programs and the daemons' where an ordinary user may run them too, and the recorders.
    fn install(&self) -> Result<()> {
        fs::create_dir(&self.programs)?;
        for name in ["oci-mps", "oci-mps-runtime", "containerd-shim-mps-v2"] {
            let (from, to) = (program(name), self.programs.join(name));
            // a program finds the others beside itself, so a link in another directory would not do
            if fs::hard_link(&from, &to).is_err() {
                fs::copy(&from, &to).with_context(|| format!("copying {}", from.display()))?;
            }
        }
        for (driver, key) in [(Driver::D535, "MPS_CONTROL_535"), (Driver::D550, "MPS_CONTROL_550")] {
            if let Ok(path) = MACHINE.find(key) {
                fs::copy(path, self.control_program(driver)).with_context(|| format!("copying {key}"))?;
            }
        }
        for (name, key) in [("runc", "RUNC"), ("crun", "CRUN")] {
            if let Ok(path) = MACHINE.find(key) {
                self.script(name, &recorder(&self.path().join("seen"), path))?;
            }
        }
        Ok(())
    }

    /// Says what oci-mps-runtime and podman are to end in.
    pub(crate) fn use_crun(&mut self) {
        self.runtime = "crun";
    }

    /// The low-level runtime, which notes what it is given. podman knows by its name what it can do.
    pub(crate) fn runtime(&self) -> PathBuf {
        self.path().join(self.runtime)
    }

    fn control_program(&self, driver: Driver) -> PathBuf {
        self.programs.join(match driver {
            Driver::D535 => "mps-control-535",
            Driver::D550 => "mps-control-550",
        })
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }

    /// A script that becomes one of our programs, with the variables that an engine would not hand on.
    pub(crate) fn wrapper(&self, name: &str) -> Result<PathBuf> {
        let [state, config] = self.variables().map(|(name, path)| format!("{name}={}", path.display()));
        let program = self.program(name);
        self.script(
            &format!("wrap-{name}"),
            &format!("#!/bin/sh\nexec /usr/bin/env {state} {config} {} \"$@\"\n", program.display()),
        )
    }

    pub(crate) fn script(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path().join(name);
        fs::write(&path, text).with_context(|| format!("writing the script {name}"))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// What follows is run by whom this instance belongs to.
    fn as_owner(&self) -> Command {
        let mut command = Command::new("setpriv");
        if let Some(user) = self.user.map(|user| user.to_string()) {
            command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
        }
        command
    }

    /// `oci-mps …`, as the administrator calls it.
    pub(crate) fn oci_mps(&self, arguments: &[&str]) -> String {
        let mut command = self.as_owner();
        command.arg(self.program("oci-mps")).args(arguments).envs(self.variables());
        let output = command.output().unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "oci-mps {arguments:?} ended with {}: {stderr}", output.status);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// What `oci-mps …` says where it does not do what it is told.
    pub(crate) fn try_oci_mps(&self, arguments: &[&str]) -> String {
        let mut command = self.as_owner();
        command.arg(self.program("oci-mps")).args(arguments).envs(self.variables());
        let output = command.output().unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
        assert!(!output.status.success(), "oci-mps {arguments:?} was not refused");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Who has a share, by `oci-mps shares --json`.
    pub(crate) fn shares(&self) -> Vec<Value> {
        let said = self.oci_mps(&["shares", "--json"]);
        let value: Value =
            serde_json::from_str(&said).unwrap_or_else(|error| panic!("not JSON ({error}): {said}"));
        value["shares"].as_array().unwrap_or_else(|| panic!("no list of shares: {said}")).clone()
    }

    /// How many records the ledger itself holds, of the living and the dead; none where it cannot be read.
    pub(crate) fn records(&self) -> Option<usize> {
        let Ok(bytes) = fs::read(self.state().join("shares.json")) else { return Some(0) };
        let value: Value = serde_json::from_slice(&bytes).ok()?;
        Some(value["shares"].as_array()?.len())
    }

    /// What oci-mps told its log, where the engine hides its standard error.
    pub(crate) fn log(&self) -> String {
        let mut text = String::new();
        let logs = fs::read_dir(self.state().join("log")).into_iter().flatten().flatten();
        for entry in logs.filter(|entry| !entry.file_name().to_string_lossy().starts_with("control")) {
            text += &fs::read_to_string(entry.path()).unwrap_or_default();
        }
        text
    }

    /// The daemon that works for this host, whether it can say so or not.
    pub(crate) fn daemon(&self) -> Option<i32> {
        processes::find(|process| {
            process.name() == "nvidia-cuda-mps" || process.name().starts_with("mps-control-5")
        })
        .into_iter()
        .find(|process| process.has_variable("CUDA_MPS_PIPE_DIRECTORY", &self.state().join("pipe")))
        .map(|process| process.pid)
    }

    /// What the daemon answers the administrator.
    pub(crate) fn ask_daemon(&self, command: &str) -> String {
        self.try_daemon(command).unwrap_or_else(|error| panic!("asking the daemon {command}: {error:#}"))
    }

    fn try_daemon(&self, command: &str) -> Result<String> {
        let mut child = self
            .as_owner()
            .args(["timeout", "5"])
            .arg(self.control_program(Driver::D550))
            .env("CUDA_MPS_PIPE_DIRECTORY", self.state().join("pipe"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        writeln!(child.stdin.take().context("its standard input")?, "{command}")?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }

    pub(crate) fn end_daemon(&self) {
        while let Some(pid) = self.daemon() {
            processes::kill(pid);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end_daemon();
    }
}

/// A low-level runtime that keeps the `config.json` of each container it is to make. It has no PATH.
fn recorder(seen: &Path, runtime: &Path) -> String {
    format!(
        r#"#!/bin/sh
bundle=. before= makes=
for word; do
  case $before in --bundle | -b) bundle=$word ;; esac
  case $word in create | run) makes=1 ;; esac
  before=$word
done
if [ "$makes" ]; then
  /bin/cp "$bundle/config.json" "{seen}/new.$$" && /bin/mv "{seen}/new.$$" "{seen}/config.json"
fi
exec {runtime} "$@"
"#,
        seen = seen.display(),
        runtime = runtime.display()
    )
}
