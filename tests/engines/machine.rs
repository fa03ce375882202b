//! What this machine has: the answers of `tests/engines/prepare`, and what the kernel lets us do.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::{env, fs};

/// The one we are on.
pub(crate) static MACHINE: LazyLock<Machine> = LazyLock::new(Machine::look);

/// Why something cannot be tried here.
pub(crate) type Reason = String;

pub(crate) struct Machine {
    /// `KEY=path`, `MISSING_KEY=reason` and `IMAGE_NAME`.
    prepared: BTreeMap<String, String>,
    prepared_in: PathBuf,
}

impl Machine {
    fn look() -> Self {
        let home = || env::var_os("HOME").map_or_else(|| PathBuf::from("/root"), PathBuf::from);
        let cache = || env::var_os("XDG_CACHE_HOME").map_or_else(|| home().join(".cache"), PathBuf::from);
        let directory =
            env::var_os("OCI_MPS_ENGINES").map_or_else(|| cache().join("oci-mps/engines"), PathBuf::from);
        let prepared_in = directory.join("env");
        let lines = fs::read_to_string(&prepared_in).unwrap_or_default();
        let prepared = lines.lines().filter_map(|line| line.split_once('='));
        let prepared = prepared.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Self { prepared, prepared_in }
    }

    /// Where that is, or why it is not here.
    pub(crate) fn find(&self, key: &str) -> Result<&Path, Reason> {
        if let Some(path) = self.prepared.get(key) {
            return Ok(Path::new(path));
        }
        Err(match self.prepared.get(&format!("MISSING_{key}")) {
            Some(reason) => format!("no {key}: {reason}"),
            None => format!("no {key} in {}: run tests/engines/prepare", self.prepared_in.display()),
        })
    }

    /// Where that is, for somebody who asked [`Machine::lacks`] before.
    pub(crate) fn path(&self, key: &str) -> &Path {
        self.find(key).unwrap_or_else(|reason| panic!("{reason}"))
    }

    /// The name of the test image.
    pub(crate) fn image(&self) -> &str {
        self.prepared.get("IMAGE_NAME").map_or("localhost/oci-mps-test:latest", String::as_str)
    }

    /// The first of these that is not here, and why.
    pub(crate) fn lacks(&self, keys: &[&str]) -> Option<Reason> {
        if !nix::unistd::Uid::effective().is_root() {
            return Some("needs root".to_owned());
        }
        if !Path::new(env!("CARGO_BIN_EXE_oci-mps")).exists() {
            return Some(format!("{} is not built", env!("CARGO_BIN_EXE_oci-mps")));
        }
        keys.iter().find_map(|key| self.find(key).err())
    }
}

/// A program of oci-mps, as cargo built it for this test.
pub(crate) fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_oci-mps")).with_file_name(name)
}

/// `x.y.z`, from the first line that `program --version` prints.
pub(crate) fn version(program: &Path) -> String {
    let Ok(output) = Command::new(program).arg("--version").output() else { return "?".to_owned() };
    let line = String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned();
    let is_version = |word: &&str| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit());
    let words = line.split([' ', ',', '~', '+']).map(|word| word.trim_start_matches('v'));
    words.rev().find(is_version).unwrap_or("?").to_owned()
}
