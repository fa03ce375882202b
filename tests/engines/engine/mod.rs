//! The ways from a user to a container: each engine's own command line, with oci-mps where a user would put it.

mod bundle;
mod containerd;
mod mounts;
mod podman;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::container::{Container, Outcome};
use crate::host::Host;
use crate::machine::{MACHINE, Reason, version};
use crate::processes;

pub(crate) use bundle::Bundles;
pub(crate) use mounts::within_mounts;

/// An engine that is ready to run containers.
pub(crate) trait Engine: Send {
    /// What a user would type.
    fn command(&self, host: &Host, id: &str, container: &Container) -> Result<Command>;

    /// The engine's own words about a container that is there: `stop c1`, `start c1`.
    fn ask(&self, _host: &Host, words: &[&str]) -> Result<Command> {
        anyhow::bail!("this engine knows no {words:?}")
    }

    /// Whether this user is not shown what the low-level runtime or a hook says, but finds it in the log.
    fn hides_messages(&self) -> bool {
        false
    }

    /// What of a container this engine has no words for.
    fn cannot(&self, _container: &Container) -> Option<&'static str> {
        None
    }

    /// Ends what it keeps running, and takes away what it put outside the host's directory.
    fn close(&mut self, host: &Host);
}

/// An engine that may be there.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// The keys of what `prepare` must have found; the first is the engine itself.
    needs: &'static [&'static str],
    open: fn(&mut Host) -> Result<Box<dyn Engine>>,
}

/// All of them, as the suite names them.
pub(crate) const ENGINES: [Kind; 12] = [
    Kind { name: "runc", needs: &["RUNC", "ROOTFS_TAR"], open: bundle::runc },
    Kind { name: "crun", needs: &["CRUN", "RUNC", "ROOTFS_TAR"], open: bundle::crun },
    Kind { name: "podman-precreate", needs: &["PODMAN", "RUNC", "IMAGE_TAR"], open: podman::precreate },
    Kind { name: "podman-runtime", needs: &["PODMAN", "RUNC", "IMAGE_TAR"], open: podman::runtime },
    Kind { name: "podman-crun", needs: &["PODMAN", "CRUN", "IMAGE_TAR"], open: podman::crun },
    Kind { name: "podman-rootless", needs: &["PODMAN", "RUNC", "IMAGE_TAR"], open: podman::rootless },
    Kind { name: "ctr", needs: &["CONTAINERD", "CTR", "SHIM", "RUNC", "IMAGE_TAR"], open: containerd::ctr },
    Kind {
        name: "nerdctl-runtime",
        needs: &["NERDCTL", "CONTAINERD", "SHIM", "RUNC", "IMAGE_TAR"],
        open: containerd::nerdctl_runtime,
    },
    Kind {
        name: "nerdctl-shim",
        needs: &["NERDCTL", "CONTAINERD", "SHIM", "RUNC", "IMAGE_TAR"],
        open: containerd::nerdctl_shim,
    },
    Kind {
        name: "ctr2-runtime",
        needs: &["CONTAINERD2", "CTR2", "SHIM2", "RUNC", "IMAGE_TAR"],
        open: containerd::ctr2_runtime,
    },
    Kind {
        name: "nerdctl2-shim",
        needs: &["NERDCTL", "CONTAINERD2", "SHIM2", "RUNC", "IMAGE_TAR"],
        open: containerd::nerdctl2_shim,
    },
    Kind {
        name: "ctr2-shim",
        needs: &["CONTAINERD2", "CTR2", "SHIM2", "RUNC", "IMAGE_TAR"],
        open: containerd::ctr2_shim,
    },
];

impl Kind {
    pub(crate) fn lacks(&self) -> Option<Reason> {
        MACHINE.lacks(self.needs).or_else(|| MACHINE.lacks(&["MPS_CONTROL_550"]))
    }

    /// The versions of what it is made of, for the report.
    pub(crate) fn versions(&self) -> String {
        let programs = self.needs.iter().filter(|key| !key.ends_with("_TAR") && !key.starts_with("SHIM"));
        let versions = programs.filter_map(|key| {
            let path = MACHINE.find(key).ok()?;
            let name = path.file_name()?.to_string_lossy().into_owned();
            Some(format!("{name} {}", version(path)))
        });
        versions.collect::<Vec<_>>().join(", ")
    }
}

/// An engine and the host that it works for. Tests take turns.
pub(crate) struct Session {
    pub(crate) kind: &'static Kind,
    pub(crate) host: Host,
    pub(crate) engine: Box<dyn Engine>,
    containers: u32,
}

impl Session {
    pub(crate) fn open(kind: &'static Kind) -> Result<Self> {
        let mut host = Host::new()?;
        let engine = (kind.open)(&mut host).with_context(|| format!("making {} ready", kind.name))?;
        Ok(Self { kind, host, engine, containers: 0 })
    }

    /// Runs a container to its end.
    pub(crate) fn run(&mut self, container: &Container) -> Outcome {
        self.start(container).wait(Duration::from_secs(30))
    }

    /// Begins to run a container.
    pub(crate) fn start(&mut self, container: &Container) -> Running {
        self.containers += 1;
        let id = self.last_id();
        let command = self.engine.command(&self.host, &id, container);
        let command =
            command.unwrap_or_else(|error| panic!("describing a container to {}: {error:#}", self.kind.name));
        self.host.forget().unwrap_or_else(|error| panic!("{error:#}"));
        Running::start(command, self.host.path())
    }

    /// Says something to the engine about a container that is there.
    pub(crate) fn ask(&mut self, words: &[&str]) -> Outcome {
        let command = self.engine.ask(&self.host, words);
        let command = command.unwrap_or_else(|error| panic!("{}: {error:#}", self.kind.name));
        self.host.forget().unwrap_or_else(|error| panic!("{error:#}"));
        Running::start(command, self.host.path()).wait(Duration::from_secs(30))
    }

    /// What the container that was started last is called.
    pub(crate) fn last_id(&self) -> String {
        format!("{}-{}", self.kind.name, self.containers)
    }

    /// What a user is told of a container that did not start: on the terminal, or in the log where the engine keeps
    /// it from them.
    pub(crate) fn told(&self, outcome: &Outcome) -> String {
        if self.engine.hides_messages() { self.host.log() } else { outcome.stderr.clone() }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.close(&self.host);
    }
}

/// An engine's command that has not ended yet.
pub(crate) struct Running {
    child: Child,
    begun: Instant,
    output: [std::path::PathBuf; 2],
    seen: std::path::PathBuf,
}

impl Running {
    /// Into files, since what an engine leaves behind may keep a pipe open.
    fn start(mut command: Command, directory: &Path) -> Self {
        static OUTPUTS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = OUTPUTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let output = ["stdout", "stderr"].map(|name| directory.join(format!("{name}.{number}")));
        let [stdout, stderr] =
            output.each_ref().map(|path| File::create(path).expect("a file for the output"));
        let child = command.stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn();
        let child = child.unwrap_or_else(|error| panic!("starting {command:?}: {error}"));
        Self { child, begun: Instant::now(), output, seen: directory.join("seen/config.json") }
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    /// What came of it; it is killed where it takes longer.
    pub(crate) fn wait(mut self, patience: Duration) -> Outcome {
        let status = loop {
            match self.child.try_wait().expect("a child can be waited for") {
                Some(status) => break status,
                None if self.begun.elapsed() > patience => {
                    processes::kill_tree(self.child.id().cast_signed());
                    break self.child.wait().expect("a killed child ends");
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let took = self.begun.elapsed();
        let [stdout, stderr] = self.output.each_ref().map(|path| {
            let text = std::fs::read(path).unwrap_or_default();
            let _ = std::fs::remove_file(path);
            String::from_utf8_lossy(&text).into_owned()
        });
        let config = std::fs::read(&self.seen).ok();
        let config = config.map(|bytes| serde_json::from_slice(&bytes).expect("a config.json is JSON"));
        Outcome { status, stdout, stderr, took, config }
    }
}
