//! Which GPUs it will be: those that are named, else those with room, best fit first.

use std::cmp::Reverse;

use super::given::Given;
use super::room::{self, Misfit};
use super::wanted::{Ask, Wanted};
use super::{Facts, Refusal};
use crate::config::Placement;
use crate::gpu::Gpu;
use crate::size::{Field, GpuChoice};

/// The chosen GPUs in the container's numbering, with what each has to give.
pub(super) fn place<'a>(
    wanted: &Wanted,
    given: &Given,
    facts: Facts<'a>,
) -> Result<Vec<(&'a Gpu, Ask)>, Refusal> {
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
            let gpus = named(selectors, wanted, given, facts)?;
            let placed = gpus.iter().enumerate().map(|(nth, gpu)| {
                let ask = wanted.on(gpu, nth, facts.config.policy.on(gpu).slices)?;
                room::check(gpu, ask, wanted, facts).map(|_| (*gpu, ask)).map_err(|misfit| {
                    let elsewhere =
                        candidates(given, facts).into_iter().filter(|other| !gpus.contains(other));
                    room::refusal(vec![misfit], wanted, facts, &gpus, count, &elsewhere.collect::<Vec<_>>())
                })
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
    facts: Facts<'a>,
) -> Result<Vec<&'a Gpu>, Refusal> {
    let inventory = facts.inventory;
    let key = || wanted.name(Field::Gpu);
    let mut gpus: Vec<&Gpu> = Vec::new();
    for selector in selectors {
        let gpu = inventory.select(selector).map_err(|error| Refusal::NoSuchGpu { key: key(), error })?;
        if !facts.config.gpus.manages(gpu) {
            let have = list(inventory.gpus.iter().filter(|gpu| facts.config.gpus.manages(gpu)));
            return Err(Refusal::SetApart { key: key(), gpu: gpu.to_string(), have });
        }
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

/// The GPUs that may be had, if there is room on them.
fn candidates<'a>(given: &Given, facts: Facts<'a>) -> Vec<&'a Gpu> {
    let may = |gpu: &&Gpu| given.includes(gpu) && facts.config.gpus.manages(gpu) && !gpu.mig;
    facts.inventory.gpus.iter().filter(may).collect()
}

/// There are fewer GPUs than asked for, whatever room they have.
fn too_few(count: usize, have: &[&Gpu], wanted: &Wanted, given: &Given, facts: Facts<'_>) -> Refusal {
    let named: Vec<&Gpu> = facts.inventory.gpus.iter().filter(|gpu| given.includes(gpu)).collect();
    let managed: Vec<&Gpu> = named.iter().copied().filter(|gpu| facts.config.gpus.manages(gpu)).collect();
    if let ([only], [], 1) = (managed.as_slice(), have, count) {
        return Refusal::Mig { gpu: only.to_string() };
    }
    let have = match have {
        [] if managed.len() < named.len() => {
            format!("but {} is set apart on this host ([gpus] managed)", list(named.into_iter()))
        }
        [] if *given == Given::Open => "this host has none that can be shared".to_owned(),
        [] => "the engine gave this container none that is known here".to_owned(),
        _ => format!("it can have {}", list(have.iter().copied())),
    };
    Refusal::TooFewGpus { key: wanted.name(Field::Gpu), asked: count, have }
}

/// `count` GPUs of those that may be had, the hungriest amount first.
fn choose<'a>(
    count: usize,
    wanted: &Wanted,
    given: &Given,
    facts: Facts<'a>,
) -> Result<Vec<(&'a Gpu, Ask)>, Refusal> {
    let candidates = candidates(given, facts);
    if candidates.len() < count {
        return Err(too_few(count, &candidates, wanted, given, facts));
    }
    let held = facts.held.map(|share| share.gpus.as_slice()).unwrap_or_default();
    let mut order: Vec<usize> = (0..count).collect();
    let asked = |gpu: &Gpu, nth| wanted.on(gpu, nth, facts.config.policy.on(gpu).slices);
    order.sort_by_key(|nth| Reverse(candidates.first().and_then(|gpu| Some(asked(gpu, *nth).ok()?.memory))));
    let mut placed: Vec<(usize, &Gpu, Ask)> = Vec::new();
    for nth in order {
        let is_free = |gpu: &&&Gpu| !placed.iter().any(|(_, taken, _)| taken == *gpu);
        let (mut fitting, mut misfits) = (Vec::new(), Vec::new());
        for gpu in candidates.iter().filter(is_free) {
            let checked = asked(gpu, nth)
                .map_err(Misfit::Never)
                .and_then(|ask| Ok((ask, room::check(gpu, ask, wanted, facts)?)));
            match checked {
                Ok((ask, left)) => fitting.push((*gpu, ask, left)),
                Err(misfit) => misfits.push(misfit),
            }
        }
        let best = fitting.into_iter().min_by_key(|(gpu, _, rest)| {
            let was_held = held.get(nth).is_some_and(|share| share.gpu == gpu.uuid);
            let (least, most) = match facts.config.policy.placement {
                Placement::Pack => (Some(*rest), None),
                Placement::Spread => (None, Some(Reverse(*rest))),
            };
            (!was_held, least, most, gpu.index)
        });
        let (gpu, ask, _) =
            best.ok_or_else(|| room::refusal(misfits, wanted, facts, &candidates, count, &[]))?;
        placed.push((nth, gpu, ask));
    }
    placed.sort_by_key(|(nth, ..)| *nth);
    Ok(placed.into_iter().map(|(_, gpu, ask)| (gpu, ask)).collect())
}

pub(super) fn list<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> String {
    let names: Vec<String> = gpus.map(ToString::to_string).collect();
    if names.is_empty() { "GPUs that are not known here".to_owned() } else { names.join(", ") }
}
