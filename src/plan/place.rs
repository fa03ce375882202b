//! Which GPUs it will be: those that are named, else those with room, best fit first.

use std::cmp::Reverse;

use super::given::Given;
use super::wanted::Wanted;
use super::{Facts, Refusal, Shortage, ShortageKind};
use crate::config::Placement;
use crate::gpu::{Gpu, Inventory};
use crate::quantity::{MemoryQuantity, Percentage};
use crate::share::Promised;
use crate::size::{Field, GpuChoice};

/// The chosen GPUs in the container's numbering, with the memory on each.
pub(super) fn place<'a>(
    wanted: &Wanted,
    given: &Given,
    facts: Facts<'a>,
) -> Result<Vec<(&'a Gpu, MemoryQuantity)>, Refusal> {
    let count = match &wanted.gpu {
        GpuChoice::Auto(count) => count.get() as usize,
        GpuChoice::These(selectors) => selectors.len(),
    };
    if let Some(amounts) = wanted.amounts().filter(|amounts| *amounts != count) {
        return Err(Refusal::AmountsAndGpus {
            memory: wanted.name(Field::Memory),
            amounts,
            gpu: wanted.name(Field::Gpu),
            gpus: count,
        });
    }
    match &wanted.gpu {
        GpuChoice::These(selectors) => {
            let gpus = named(selectors, wanted, given, facts.inventory)?;
            let placed = gpus.into_iter().enumerate().map(|(nth, gpu)| {
                let memory = wanted.memory_on(gpu, nth);
                check(gpu, memory, wanted, facts).map(|_| (gpu, memory)).map_err(Misfit::refusal)
            });
            placed.collect()
        }
        GpuChoice::Auto(_) => choose(count, wanted, given, facts),
    }
}

/// The GPUs that were asked for by name.
fn named<'a>(
    selectors: &[crate::gpu::Selector],
    wanted: &Wanted,
    given: &Given,
    inventory: &'a Inventory,
) -> Result<Vec<&'a Gpu>, Refusal> {
    let key = || wanted.name(Field::Gpu);
    let mut gpus: Vec<&Gpu> = Vec::new();
    for selector in selectors {
        let gpu = inventory.select(selector).map_err(|error| Refusal::NoSuchGpu { key: key(), error })?;
        if gpu.mig {
            return Err(Refusal::Mig { gpu: gpu.to_string() });
        }
        if !given.includes(gpu) {
            let given = list(inventory.gpus.iter().filter(|gpu| given.includes(gpu)));
            return Err(Refusal::NotGiven { key: key(), gpu: gpu.to_string(), given });
        }
        if gpus.contains(&gpu) {
            return Err(Refusal::SameGpu { key: key(), gpu: gpu.to_string() });
        }
        gpus.push(gpu);
    }
    Ok(gpus)
}

/// `count` GPUs of those that may be had, the hungriest amount first.
fn choose<'a>(
    count: usize,
    wanted: &Wanted,
    given: &Given,
    facts: Facts<'a>,
) -> Result<Vec<(&'a Gpu, MemoryQuantity)>, Refusal> {
    let candidates: Vec<&Gpu> = facts.inventory.gpus.iter().filter(|gpu| given.includes(gpu)).collect();
    if let ([only], true) = (candidates.as_slice(), count == 1)
        && only.mig
    {
        return Err(Refusal::Mig { gpu: only.to_string() });
    }
    let candidates: Vec<&Gpu> = candidates.into_iter().filter(|gpu| !gpu.mig).collect();
    if candidates.len() < count {
        let have = match candidates.as_slice() {
            [] if *given == Given::Open => "this host has none that can be shared".to_owned(),
            [] => "the engine gave this container none that is known here".to_owned(),
            _ => format!("it can have {}", list(candidates.iter().copied())),
        };
        return Err(Refusal::TooFewGpus { key: wanted.name(Field::Gpu), asked: count, have });
    }
    let held = facts.held.map(|share| share.gpus.as_slice()).unwrap_or_default();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|nth| Reverse(candidates.first().map(|gpu| wanted.memory_on(gpu, *nth))));
    let mut placed: Vec<(usize, &Gpu, MemoryQuantity)> = Vec::new();
    for nth in order {
        let is_free = |gpu: &&&Gpu| !placed.iter().any(|(_, taken, _)| taken == *gpu);
        let (mut fitting, mut misfits) = (Vec::new(), Vec::new());
        for gpu in candidates.iter().filter(is_free) {
            let memory = wanted.memory_on(gpu, nth);
            match check(gpu, memory, wanted, facts) {
                Ok(left) => fitting.push((*gpu, memory, left)),
                Err(misfit) => misfits.push(misfit),
            }
        }
        let best = fitting.into_iter().min_by_key(|(gpu, _, left)| {
            let was_held = held.get(nth).is_some_and(|share| share.gpu == gpu.uuid);
            let fit = match facts.config.policy.placement {
                Placement::Pack => left.mib(),
                Placement::Spread => u64::MAX - left.mib(),
            };
            (!was_held, fit, gpu.index)
        });
        let (gpu, memory, _) = best.ok_or_else(|| refusal_of_all(misfits))?;
        placed.push((nth, gpu, memory));
    }
    placed.sort_by_key(|(nth, ..)| *nth);
    Ok(placed.into_iter().map(|(_, gpu, memory)| (gpu, memory)).collect())
}

/// Why one GPU does not do.
enum Misfit {
    /// It might, once others have gone.
    Full(Shortage),
    /// It never will.
    Never(Refusal),
}

impl Misfit {
    fn refusal(self) -> Refusal {
        match self {
            Self::Full(shortage) => Refusal::NoRoom { shortages: vec![shortage] },
            Self::Never(refusal) => refusal,
        }
    }
}

fn refusal_of_all(misfits: Vec<Misfit>) -> Refusal {
    let mut shortages = Vec::new();
    let mut never = None;
    for misfit in misfits {
        match misfit {
            Misfit::Full(shortage) => shortages.push(shortage),
            Misfit::Never(refusal) => never = never.or(Some(refusal)),
        }
    }
    match never {
        Some(refusal) if shortages.is_empty() => refusal,
        _ => Refusal::NoRoom { shortages },
    }
}

/// Whether the share fits on that GPU, and how much memory is then left on it.
fn check(
    gpu: &Gpu,
    memory: MemoryQuantity,
    wanted: &Wanted,
    facts: Facts<'_>,
) -> Result<MemoryQuantity, Misfit> {
    let each = memory.split(wanted.processes);
    let context = gpu.context_memory(wanted.threads);
    if each <= context {
        return Err(Misfit::Never(Refusal::LessThanAContext {
            key: wanted.name(Field::Memory),
            processes: wanted.processes.get(),
            each,
            gpu: gpu.to_string(),
            context,
            sms: gpu.sms_at(wanted.threads),
        }));
    }
    let policy = &facts.config.policy;
    let promised = Promised::of(facts.others, &gpu.uuid);
    let full = |field: Field, kind: ShortageKind| {
        Err(Misfit::Full(Shortage { gpu: gpu.to_string(), kind, key: wanted.name(field) }))
    };

    let left = policy.shareable(gpu.memory).minus(promised.memory);
    if memory > left {
        return full(Field::Memory, ShortageKind::Memory { left, asked: memory });
    }
    let threads = u64::from(wanted.threads.thousandths()) * u64::from(wanted.processes.get());
    let threads_left = u64::from(Percentage::WHOLE.thousandths()).saturating_sub(promised.threads);
    if !policy.threads_overcommit && threads > threads_left {
        return full(Field::Threads, ShortageKind::Threads { left: threads_left, asked: threads });
    }
    let slots_left = gpu.client_slots(facts.inventory.cuda).saturating_sub(promised.clients);
    if wanted.processes.get() > slots_left {
        let kind = ShortageKind::Clients { left: slots_left, asked: wanted.processes.get() };
        return full(Field::Processes, kind);
    }
    Ok(left.minus(memory))
}

/// The refusal's sentence: one GPU at a time, then where to look.
pub(super) fn sentence(shortages: &[Shortage]) -> String {
    let each: Vec<String> = shortages.iter().map(ToString::to_string).collect();
    format!("{}; see 'oci-mps shares'", each.join("; "))
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { gpu, kind, key } = self;
        match kind {
            ShortageKind::Memory { left, asked } => {
                write!(f, "{gpu} has {left} left to share, {key} asks for {asked}")
            }
            ShortageKind::Threads { left, asked } => {
                let (left, asked) = (percent(*left), percent(*asked));
                write!(f, "{gpu} has {left}% of its threads left to share, {key} asks for {asked}%")
            }
            ShortageKind::Clients { left, asked } => {
                write!(f, "{gpu} has {left} MPS client slot(s) left, {key} takes {asked}")
            }
        }
    }
}

/// Thousandths of a percent, as people write them.
#[expect(clippy::cast_precision_loss, reason = "printed only; far below 2^52")]
fn percent(thousandths: u64) -> f64 {
    thousandths as f64 / 1000.0
}

fn list<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    let names: Vec<String> = gpus.map(ToString::to_string).collect();
    if names.is_empty() { "GPUs that are not known here".to_owned() } else { names.join(", ") }
}
