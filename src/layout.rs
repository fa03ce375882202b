//! Every path and every `CUDA_MPS_*` name, once.
//!
//! ```text
//! /run/oci-mps/                 the state directory: root's, or $XDG_RUNTIME_DIR/oci-mps, or $OCI_MPS_STATE_DIR
//! ├── pipe/                     the daemon's own: control, control_privileged, control_lock, log (0711)
//! ├── client/                   what containers see: a hard link to pipe/control and nothing else
//! ├── gpus.json                 the inventory, as NVML gave it in this boot
//! ├── shares.json               who was promised what
//! ├── shares.next              the same while it is written, and after a writer was killed
//! ├── shares.lock               held while shares.json is read, decided upon and written
//! ├── answered.json            the daemon's connections when it last answered
//! ├── start.lock                held while the daemon is started or the client directory renewed
//! ├── command.lock              held while the daemon answers one command
//! └── bin/runc                  where the shim's runc is found: a link to oci-mps-runtime
//! ```

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The variables that MPS clients and the daemon read (NVIDIA's MPS guide, "Environment variables").
pub mod env {
    /// Where the `control` socket is.
    pub const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
    /// Where the daemon and the servers log.
    pub const LOG_DIRECTORY: &str = "CUDA_MPS_LOG_DIRECTORY";
    /// Device memory that a client may take, by ordinal: `0=8192M,1=4096M`.
    pub const MEMORY_LIMIT: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    /// The ceiling on a client's share of the SMs, in percent.
    pub const THREAD_PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
    /// A client's priority: 0 normal, 1 below normal.
    pub const PRIORITY: &str = "CUDA_MPS_CLIENT_PRIORITY";
    /// Everything of MPS begins so; a container keeps none of it that oci-mps did not set.
    pub const MPS_PREFIX: &str = "CUDA_MPS_";
    /// The GPUs that CUDA shows a process, in its numbering.
    pub const CUDA_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
    /// The GPUs that NVIDIA's container toolkit gives a container.
    pub const TOOLKIT_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
    /// Names another configuration file.
    pub const CONFIG: &str = "OCI_MPS_CONFIG";
    /// Names another state directory, for tests and for several instances side by side.
    pub const STATE_DIR: &str = "OCI_MPS_STATE_DIR";
}

/// The key under which a spec carries the token of its share. It belongs to oci-mps: nobody asks with it, and nobody
/// would think of it.
pub const TOKEN_ANNOTATION: &str = "oci-mps/.token";

/// Where programs are when nobody says where: engines start us with whatever `PATH` they have, or none.
pub const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Everything a container asks for begins so.
pub const ANNOTATION_PREFIX: &str = "oci-mps/";

/// In bytes. The daemon ends without a word where the path of its longest socket is longer than 106 bytes, one fewer
/// than `sun_path` would hold (seen with 535 and 550: a directory of 87 bytes works, one of 88 does not).
pub const LONGEST_PIPE_DIRECTORY: usize = 106 - "/control_privileged".len();

/// Whose instance of oci-mps this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The machine's.
    Root,
    /// A user's own, by the user id on the host.
    User(u32),
}

/// Where things are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    state: PathBuf,
    logs: PathBuf,
    config: PathBuf,
}

impl Layout {
    /// The layout of `owner`, with what the environment names instead.
    ///
    /// An engine's hook has an empty environment, so a user's runtime directory is the one that logind makes, whatever
    /// `XDG_RUNTIME_DIR` says: a user has one ledger. Without logind it is what the variable says, else one in `/tmp`
    /// (which is used only if it is that user's).
    pub fn new(owner: Owner, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        // hooks and containers start in other directories than whoever set the variable
        let absolute = |value: OsString| std::path::absolute(&value).unwrap_or_else(|_| PathBuf::from(value));
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(absolute);
        let own = match owner {
            Owner::Root => PathBuf::from("/run/oci-mps"),
            Owner::User(uid) => Some(PathBuf::from(format!("/run/user/{uid}")))
                .filter(|usual| usual.is_dir())
                .or_else(|| path("XDG_RUNTIME_DIR"))
                .map_or_else(|| PathBuf::from(format!("/tmp/oci-mps-{uid}")), |base| base.join("oci-mps")),
        };
        let state = path(env::STATE_DIR).unwrap_or_else(|| own.clone());
        let logs = match owner {
            Owner::Root if state == own => PathBuf::from("/var/log/oci-mps"),
            _ => state.join("log"),
        };
        let config = path(env::CONFIG).unwrap_or_else(|| PathBuf::from("/etc/oci-mps/config.toml"));
        Self { state, logs, config }
    }

    /// Everything that lives until the next boot.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// The daemon's log, and ours where there is no journald.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// The host's configuration.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// The daemon's `CUDA_MPS_PIPE_DIRECTORY`. It holds `control_privileged`, so it is not for containers.
    pub fn pipe(&self) -> PathBuf {
        self.state.join("pipe")
    }

    /// The directory that containers see.
    pub fn client(&self) -> PathBuf {
        self.state.join("client")
    }

    /// The inventory's cache.
    pub fn inventory(&self) -> PathBuf {
        self.state.join("gpus.json")
    }

    /// The ledger.
    pub fn shares(&self) -> PathBuf {
        self.state.join("shares.json")
    }

    /// The ledger while it is written.
    pub fn shares_next(&self) -> PathBuf {
        self.state.join("shares.next")
    }

    /// Held while the ledger is read, decided upon and written.
    pub fn shares_lock(&self) -> PathBuf {
        self.state.join("shares.lock")
    }

    /// The daemon's connections when it last answered.
    pub fn answered(&self) -> PathBuf {
        self.state.join("answered.json")
    }

    /// Held while the daemon is started or the client directory renewed.
    pub fn start_lock(&self) -> PathBuf {
        self.state.join("start.lock")
    }

    /// Held while the daemon answers one command.
    pub fn command_lock(&self) -> PathBuf {
        self.state.join("command.lock")
    }

    /// What the shim puts in front of the real shim's `PATH`.
    pub fn shim_path(&self) -> PathBuf {
        self.state.join("bin")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(owner: Owner, variables: &[(&str, &str)]) -> Layout {
        Layout::new(owner, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn root_users_and_other_instances_each_have_their_own() {
        assert_eq!(of(Owner::Root, &[]).pipe(), Path::new("/run/oci-mps/pipe"));
        assert_eq!(of(Owner::Root, &[("XDG_RUNTIME_DIR", "/run/user/0")]).state(), Path::new("/run/oci-mps"));
        assert_eq!(
            of(Owner::User(987_654), &[]).client(),
            Path::new("/tmp/oci-mps-987654/client"),
            "no logind"
        );
        let elsewhere = of(Owner::User(7), &[("XDG_RUNTIME_DIR", "/tmp/x")]);
        assert_eq!(elsewhere.shares(), Path::new("/tmp/x/oci-mps/shares.json"));
        let second = of(Owner::Root, &[(env::STATE_DIR, "/srv/two"), (env::CONFIG, "/srv/two.toml")]);
        assert_eq!(second.logs(), Path::new("/srv/two/log"));
        let said = of(Owner::Root, &[(env::STATE_DIR, "/run/oci-mps")]);
        assert_eq!(
            said,
            of(Owner::Root, &[]),
            "a hook is told the state directory even where it is the usual one"
        );
        assert_eq!(second.config(), Path::new("/srv/two.toml"));
    }

    #[test]
    fn an_empty_variable_is_no_variable() {
        assert_eq!(of(Owner::Root, &[(env::STATE_DIR, "")]), of(Owner::Root, &[]));
    }
}
