//! The decision: what one container asks for, what the host has and has promised, to a share and the edits that give
//! it. Pure: no files, no clock, no processes. Whoever calls it holds the lock and acts on the answer.

mod edits;
mod given;
mod place;
mod room;
mod wanted;

use std::path::PathBuf;

use crate::config::HostConfig;
use crate::gpu::{Inventory, NameError, SelectError};
use crate::quantity::{MemoryQuantity, Percentage};
use crate::request::Request;
use crate::share::{GpuShare, Share, Token};
use crate::spec::{Document, Edit, SpecError};

pub use room::{Fit, Holder, Shortage, ShortageKind};
use wanted::Wanted;

/// Where the host keeps what a container is given, and how its hooks are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The client directory on the host.
    pub client_dir: PathBuf,
    /// The program that the hooks run, by its absolute path.
    pub hook_program: PathBuf,
    /// `NAME=value` for the hooks, which otherwise have no environment.
    pub hook_env: Vec<String>,
    /// Whether the host has `/dev/mqueue`, which a system without systemd need not.
    pub has_message_queues: bool,
    /// Whether the engine itself is in a user namespace, as it is without root.
    pub in_user_namespace: bool,
}

/// What the decision is made from.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// What the administrator wants.
    pub config: &'a HostConfig,
    /// What there is.
    pub inventory: &'a Inventory,
    /// What was promised to other containers.
    pub others: &'a [&'a Share],
    /// What this container was promised before, where its spec is seen a second time.
    pub held: Option<&'a Share>,
    /// The name that its share has or is to have.
    pub token: &'a Token,
    /// The host's paths.
    pub site: &'a Site,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The promise.
    pub share: Share,
    /// The changes to the spec that keep it.
    pub edits: Vec<Edit>,
}

/// Why a container does not get what it asks for. Each says what would work.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The document itself is not as the specification says.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Nobody said how much memory.
    #[error(
        "{key} makes this container an MPS client, but nothing says how much memory it gets; add oci-mps/memory=…, or \
         give [defaults] a memory in the configuration"
    )]
    NoMemory {
        /// The annotation that asks.
        key: String,
    },
    /// A profile that the configuration does not have.
    #[error("oci-mps/profile: there is no profile {name:?}; {have}")]
    NoSuchProfile {
        /// As it was given.
        name: String,
        /// Those that there are.
        have: String,
    },
    /// Only profiles are allowed and something else is asked for.
    #[error("{key}: this host gives shares by profile only; use oci-mps/profile alone ({have})")]
    OnlyProfiles {
        /// The annotation.
        key: String,
        /// Those that there are.
        have: String,
    },
    /// More slices than the GPU is cut into.
    #[error("{key} asks for {asked} slices, but {gpu} is cut into {slices} here ([policy] slices)")]
    TooManySlices {
        /// Who asks.
        key: String,
        /// For how many.
        asked: u32,
        /// Of which GPU.
        gpu: String,
        /// How many there are.
        slices: u32,
    },
    /// As many amounts as GPUs are needed, or one.
    #[error(
        "{memory} names {amounts} amounts, but {gpus} GPU(s) are chosen; write one amount, or {gpu}=auto:{amounts}"
    )]
    AmountsAndGpus {
        /// Who gives the amounts.
        memory: String,
        /// How many.
        amounts: usize,
        /// Who chooses the GPUs.
        gpu: String,
        /// How many.
        gpus: usize,
    },
    /// A GPU that the host does not have.
    #[error("{key}: {error}")]
    NoSuchGpu {
        /// Who names it.
        key: String,
        /// What there is instead.
        error: SelectError,
    },
    /// Two names for the same GPU.
    #[error("{key} names {gpu} twice; name each GPU once")]
    SameGpu {
        /// Who names it.
        key: String,
        /// The GPU.
        gpu: String,
    },
    /// More GPUs than there are.
    #[error("{key} asks for {asked} GPUs, {have}")]
    TooFewGpus {
        /// Who asks.
        key: String,
        /// For how many.
        asked: usize,
        /// What there is.
        have: String,
    },
    /// A GPU that the administrator keeps for something else.
    #[error("{key} chooses {gpu}, which is set apart on this host ([gpus] managed); there is {have}")]
    SetApart {
        /// Who chooses it.
        key: String,
        /// The GPU.
        gpu: String,
        /// Those that are shared.
        have: String,
    },
    /// A GPU that is cut into MIG devices.
    #[error(
        "{gpu} is in MIG mode, which oci-mps cannot share yet; choose another with oci-mps/gpu, or turn MIG off"
    )]
    Mig {
        /// The GPU.
        gpu: String,
    },
    /// The engine gave the container GPUs that cannot be read.
    #[error("{variable}={value}: {error}")]
    GivenName {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        error: NameError,
    },
    /// The engine gave the container other GPUs.
    #[error(
        "{key} chooses {gpu}, but the engine gave this container only {given}; ask the engine for it too"
    )]
    NotGiven {
        /// Who chooses it.
        key: String,
        /// The GPU.
        gpu: String,
        /// What the engine gave.
        given: String,
    },
    /// No room.
    #[error("{}", room::sentence(shortages, fit.as_ref()))]
    NoRoom {
        /// One for each GPU that was looked at.
        shortages: Vec<Shortage>,
        /// What the container could ask for instead, where there is such a thing.
        fit: Option<Fit>,
    },
    /// Less than one CUDA context for each process.
    #[error(
        "{key} gives each of {processes} process(es) {each}, but a CUDA context on {gpu} takes about {context} with \
         {sms} SMs; ask for more memory, or for fewer oci-mps/threads"
    )]
    LessThanAContext {
        /// Who asks for the memory.
        key: String,
        /// How many share it.
        processes: u32,
        /// What each gets.
        each: MemoryQuantity,
        /// The GPU.
        gpu: String,
        /// What a context takes.
        context: MemoryQuantity,
        /// The SMs that each may use.
        sms: u32,
    },
    /// The host's IPC namespace, in a pod.
    #[error(
        "{key}=host: in a pod its own setting stands; set hostIPC: true in the pod, or leave the annotation out"
    )]
    HostIpcInPod {
        /// Who asks.
        key: String,
    },
    /// The host's IPC namespace, where the engine joined another container's.
    #[error(
        "{key}=host: the engine put this container into the IPC namespace {path}; leave out one of the two"
    )]
    HostIpcJoined {
        /// Who asks.
        key: String,
        /// The namespace.
        path: String,
    },
    /// A kernel setting that exists once for each IPC namespace.
    #[error(
        "the sysctl {sysctl} cannot be set for a container in the host's IPC namespace; leave it out, or keep the \
         container's own with oci-mps/ipc=private"
    )]
    IpcSysctl {
        /// Its name.
        sysctl: String,
    },
    /// A mount that would hide the socket.
    #[error("the mount at {destination} would hide the MPS socket in {pipe_dir}; mount it elsewhere")]
    HiddenSocket {
        /// Where the mount is.
        destination: String,
        /// What it hides.
        pipe_dir: String,
    },
}

/// Decides.
///
/// # Errors
/// A [`Refusal`]; nothing has been done then.
pub fn plan(document: &Document, request: &Request, facts: Facts<'_>) -> Result<Plan, Refusal> {
    let wanted = Wanted::of(request, facts.config)?;
    let given = given::read(document)?;
    let placed = place::place(&wanted, &given, facts)?;
    // MPS takes one ceiling for all GPUs of a process, so of GPUs that are cut differently the finest cut counts
    let threads = placed.iter().map(|(_, ask)| ask.threads).min().unwrap_or(Percentage::WHOLE);
    let share = Share {
        token: facts.token.clone(),
        gpus: placed
            .iter()
            .map(|(gpu, ask)| GpuShare { gpu: gpu.uuid.clone(), memory: ask.memory })
            .collect(),
        threads,
        processes: wanted.processes,
        priority: wanted.priority,
    };
    let edits = edits::of(document, &share, &wanted, facts)?;
    Ok(Plan { share, edits })
}

#[cfg(test)]
mod tests;
