//! Which GPUs the engine has already given to the container.

use super::Refusal;
use crate::gpu::{Gpu, Selector};
use crate::layout::env;
use crate::spec::Document;

/// What the engine gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// Nothing yet, or all: the choice is ours.
    Open,
    /// These, by their device nodes `/dev/nvidia<minor>`.
    Nodes(Vec<u32>),
    /// These, by what NVIDIA's container toolkit was told.
    Named(Vec<Selector>),
}

/// Device nodes in the spec are what the container really has (CDI, `--device`); `NVIDIA_VISIBLE_DEVICES` is what the
/// toolkit will still bring (k8s device plugin, `--gpus`, images).
pub(super) fn read(document: &Document) -> Result<Given, Refusal> {
    // without root podman cannot make nodes and binds the host's
    let bound = document.mounts().map(|mount| mount.destination);
    let minors: Vec<u32> = document.devices().chain(bound).filter_map(minor).collect();
    if !minors.is_empty() {
        return Ok(Given::Nodes(minors));
    }
    let variables = document.env()?;
    // of duplicates the last one counts, as for `getenv` in most C libraries' and Go's processes
    let Some((_, value)) = variables.iter().rfind(|(name, _)| *name == env::TOOLKIT_DEVICES) else {
        return Ok(Given::Open);
    };
    // the toolkit's words (nvidia-container-toolkit, "Supported environment variables")
    if matches!(*value, "" | "all" | "none" | "void") {
        return Ok(Given::Open);
    }
    let name = |name: &str| name.trim_start_matches("nvidia.com/gpu=").parse();
    let selectors = value.split(',').map(name).collect::<Result<Vec<_>, _>>().map_err(|error| {
        Refusal::GivenName { variable: env::TOOLKIT_DEVICES, value: (*value).to_owned(), error }
    })?;
    Ok(Given::Named(selectors))
}

impl Given {
    /// Whether the container has, or will have, this GPU.
    pub(super) fn includes(&self, gpu: &Gpu) -> bool {
        match self {
            Self::Open => true,
            Self::Nodes(minors) => minors.contains(&gpu.device_minor()),
            Self::Named(selectors) => selectors.iter().any(|selector| selector.matches(gpu)),
        }
    }
}

/// The number of a GPU's device node; `/dev/nvidiactl` and `/dev/nvidia-uvm` are no GPU's.
fn minor(path: &str) -> Option<u32> {
    path.strip_prefix("/dev/nvidia")?.parse().ok()
}
