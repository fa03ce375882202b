//! What containers use of their shares, as far as the driver says it, and what engines' stores call them. Both take
//! their time, so neither is for a starting container.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::config::{HostConfig, SourceKind};
use crate::gpu::Uuid;
use crate::inventory::{self, ProcessUse};
use crate::kernel::{self, Process};
use crate::ledger::{Container, Owner, Record};
use crate::quantity::MemoryQuantity;

/// The driver's list of processes, with the host's numbers; none where it cannot be asked.
pub(super) struct Used(Option<Vec<ProcessUse>>);

impl Used {
    pub(super) fn now(config: &HostConfig) -> Self {
        Self(match config.inventory.source {
            SourceKind::Nvml => inventory::use_by_process().ok(),
            SourceKind::File => None,
        })
    }

    /// What the processes of that container take of that GPU.
    pub(super) fn by(&self, record: &Record, gpu: &Uuid) -> Option<MemoryQuantity> {
        let processes = self.0.as_ref()?;
        let Owner::Attached(container) = &record.owner else { return Some(MemoryQuantity::ZERO) };
        let theirs = processes.iter().filter(|used| used.gpu == *gpu && is_in(used.pid, container));
        theirs.map(|used| used.memory).try_fold(MemoryQuantity::ZERO, |sum, one| Some(sum.plus(one?)))
    }
}

/// Whether a process belongs to the container: by its cgroup, or where the engine gave it none of its own, by the PID
/// namespace.
fn is_in(pid: i32, container: &Container) -> bool {
    if pid == container.process.pid {
        return true;
    }
    let Ok(process) = Process::find(pid) else { return false };
    let below = |cgroup: &str| {
        cgroup
            .strip_prefix(container.cgroup.as_deref().unwrap_or("/"))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if container.cgroup.as_deref().is_some_and(|cgroup| cgroup != "/") {
        return process.cgroup().is_some_and(|cgroup| below(&cgroup));
    }
    let namespace = |pid: i32| format!("/proc/{pid}/ns/pid");
    let [theirs, its, ours] =
        [container.process.pid, pid, Process::this().map_or(0, |this| this.pid)].map(namespace);
    kernel::same_file(Path::new(&theirs), Path::new(&its))
        && !kernel::same_file(Path::new(&theirs), Path::new(&ours))
}

/// podman says neither name nor image in its annotations, but keeps both in its store, beside the bundle
/// (containers/storage, `containers.json`; `volatile-containers.json` for those of `--rm` since 4.4).
pub(super) fn complete(container: &mut Container) {
    if container.origin.engine.as_deref() != Some("podman") {
        return;
    }
    let Some(store) = container.bundle.ancestors().nth(2).map(Path::to_owned) else { return };
    for file in ["containers.json", "volatile-containers.json"] {
        let listed =
            fs::read(store.join(file)).ok().and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok());
        let Some(Value::Array(listed)) = listed else { continue };
        let Some(entry) = listed.into_iter().find(|entry| entry["id"] == container.id.as_str()) else {
            continue;
        };
        let metadata = entry["metadata"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
        let word = |value: &Value| value.as_str().filter(|word| !word.is_empty()).map(ToOwned::to_owned);
        container.origin.name = word(&entry["names"][0]).or(container.origin.name.take());
        container.origin.image = metadata.and_then(|metadata| word(&metadata["image-name"]));
    }
}
