//! What a user asks an engine to run, and what came of it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use serde_json::Value;

/// A container, as a user would describe it on any engine's command line.
#[derive(Clone, Debug, Default)]
pub(crate) struct Container {
    pub(crate) annotations: Vec<(String, String)>,
    pub(crate) env: Vec<String>,
    pub(crate) command: Vec<String>,
    /// Bound read-write: host path, path in the container.
    pub(crate) mounts: Vec<(PathBuf, String)>,
    pub(crate) sysctl: Option<(String, String)>,
    /// By numbers; root where there is none.
    pub(crate) user: Option<u32>,
    /// Root in the container is nobody on the host.
    pub(crate) user_namespace: bool,
    /// The engine's own `--ipc=host`.
    pub(crate) ipc_host: bool,
    /// Goes on when the engine's command has ended, and is kept when it has.
    pub(crate) detached: bool,
    /// How often the engine starts it again when it fails.
    pub(crate) retries: Option<u32>,
    /// An IPC namespace that is joined; only a bundle can say so.
    pub(crate) ipc_of: Option<PathBuf>,
}

/// 8 GiB and a quarter of the threads, of whichever GPU.
pub(crate) const QUARTER: [(&str, &str); 2] = [("oci-mps/memory", "8GiB"), ("oci-mps/threads", "25")];

impl Container {
    /// One that says what CUDA sees.
    pub(crate) fn probe() -> Self {
        Self::of(&["cuda-probe", "--timeout", "10"])
    }

    /// One that runs a script.
    pub(crate) fn shell(script: &str) -> Self {
        Self::of(&["sh", "-c", script])
    }

    fn of(command: &[&str]) -> Self {
        Self { command: command.iter().map(|word| (*word).to_owned()).collect(), ..Self::default() }
    }

    pub(crate) fn in_a_user_namespace(self) -> Self {
        Self { user_namespace: true, ..self }
    }

    pub(crate) fn with(mut self, annotations: &[(&str, &str)]) -> Self {
        let owned = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        self.annotations.extend(owned);
        self
    }

    pub(crate) fn env(mut self, variables: &[&str]) -> Self {
        self.env.extend(variables.iter().map(|variable| (*variable).to_owned()));
        self
    }

    pub(crate) fn mount(mut self, source: &Path, destination: &str) -> Self {
        self.mounts.push((source.to_owned(), destination.to_owned()));
        self
    }
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) took: Duration,
    /// The `config.json` that the low-level runtime was given; none where it was not called.
    pub(crate) config: Option<Value>,
}

impl Outcome {
    /// Its standard output, where it ran and ended well.
    pub(crate) fn output(&self) -> &str {
        assert!(self.status.success(), "the container did not run: {self}");
        self.stdout.trim_end()
    }

    /// What `cuInit` said in it.
    pub(crate) fn cu_init(&self) -> i64 {
        let said: Value = serde_json::from_str(self.output())
            .unwrap_or_else(|error| panic!("cuda-probe printed no JSON ({error}): {self}"));
        said["cuInit"].as_i64().unwrap_or_else(|| panic!("cuda-probe did not reach the driver: {self}"))
    }

    pub(crate) fn config(&self) -> &Value {
        self.config.as_ref().unwrap_or_else(|| panic!("the low-level runtime was given no container: {self}"))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { status, stdout, stderr, took, .. } = self;
        write!(f, "{status} after {took:.1?}\n--- stdout\n{stdout}\n--- stderr\n{stderr}\n---")
    }
}
