//! Whether a GPU has room, and for somebody who finds none: what is left, who has it, and what would fit.

use std::fmt;
use std::num::NonZeroU32;

use super::place::list;
use super::wanted::{Ask, Memory, Wanted};
use super::{Facts, Refusal};
use crate::gpu::Gpu;
use crate::quantity::{MemoryQuantity, Percentage};
use crate::share::{Promised, Share, Token};
use crate::size::{Field, MemoryAsk};

/// How many of those who have a share of a GPU, and how many GPUs, a refusal names.
const NAMED: usize = 3;

/// What one GPU lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The GPU.
    pub gpu: String,
    /// What of it.
    pub kind: ShortageKind,
    /// Who asks.
    pub key: String,
    /// Who has most of it.
    pub holders: Vec<Holder>,
    /// How many more have some of it.
    pub more: usize,
}

/// Somebody who has what another one asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The name of the share.
    pub token: Token,
    /// What people call its container; empty until somebody who knows says so.
    pub name: String,
    /// How much it has, as people write it.
    pub has: String,
}

/// What a GPU can be short of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortageKind {
    /// Device memory.
    Memory {
        /// What is left to share.
        left: MemoryQuantity,
        /// What is asked for.
        asked: MemoryQuantity,
    },
    /// Threads, where their over-commitment is forbidden; in thousandths of a percent.
    Threads {
        /// What is left to share.
        left: u64,
        /// What is asked for.
        asked: u64,
    },
    /// Client slots.
    Clients {
        /// What is left.
        left: u32,
        /// What is asked for.
        asked: u32,
    },
}

/// What could be asked for instead, everything else as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The same, on these GPUs.
    Elsewhere(String),
    /// So much memory.
    Memory(MemoryQuantity),
    /// So many slices.
    Slices(NonZeroU32),
    /// Such a ceiling on threads.
    Threads(Percentage),
    /// So many processes.
    Processes(NonZeroU32),
    /// Nothing, until somebody ends.
    Nothing,
}

/// Why one GPU does not do.
pub(super) enum Misfit {
    /// It might, once others have gone.
    Full(Shortage),
    /// It never will.
    Never(Refusal),
}

/// What would be left on a GPU: where two leave as much memory the threads decide, and then the client slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rest {
    memory: MemoryQuantity,
    threads: u64,
    clients: u32,
}

/// Whether the share fits on that GPU, and what is then left on it.
pub(super) fn check(gpu: &Gpu, ask: Ask, wanted: &Wanted, facts: Facts<'_>) -> Result<Rest, Misfit> {
    let each = ask.memory.split(ask.processes);
    let context = gpu.context_memory(ask.threads);
    if each <= context {
        return Err(Misfit::Never(Refusal::LessThanAContext {
            key: wanted.name(Field::Memory),
            processes: ask.processes.get(),
            each,
            gpu: gpu.to_string(),
            context,
            sms: gpu.sms_at(ask.threads),
        }));
    }
    let left = Left::on(gpu, ask.in_slices, facts);
    let full = |field: Field, kind: ShortageKind| {
        let (holders, more) = holders(gpu, kind, facts.others);
        let (gpu, key) = (gpu.to_string(), wanted.name(field));
        Err(Misfit::Full(Shortage { gpu, kind, key, holders, more }))
    };
    if ask.memory > left.memory {
        return full(Field::Memory, ShortageKind::Memory { left: left.memory, asked: ask.memory });
    }
    let threads = u64::from(ask.threads.thousandths()) * u64::from(ask.processes.get());
    if left.threads_are_bounded && threads > left.threads {
        return full(Field::Threads, ShortageKind::Threads { left: left.threads, asked: threads });
    }
    if ask.processes.get() > left.clients {
        let kind = ShortageKind::Clients { left: left.clients, asked: ask.processes.get() };
        return full(Field::Processes, kind);
    }
    Ok(Rest {
        memory: left.memory.minus(ask.memory),
        threads: left.threads.saturating_sub(threads),
        clients: left.clients - ask.processes.get(),
    })
}

/// What a GPU still has to give.
struct Left {
    memory: MemoryQuantity,
    /// Until the ceilings add up to all of it, in thousandths of a percent.
    threads: u64,
    /// Whether they may not add up to more.
    threads_are_bounded: bool,
    clients: u32,
}

impl Left {
    fn on(gpu: &Gpu, in_slices: bool, facts: Facts<'_>) -> Self {
        let terms = facts.config.policy.on(gpu);
        let promised = Promised::of(facts.others.iter().copied(), &gpu.uuid);
        let all = if in_slices { terms.sliceable(gpu.memory) } else { terms.shareable(gpu.memory) };
        Self {
            memory: all.minus(promised.memory),
            threads: u64::from(Percentage::WHOLE.thousandths()).saturating_sub(promised.threads),
            threads_are_bounded: !terms.threads_overcommit,
            clients: gpu.client_slots(facts.inventory.cuda).saturating_sub(promised.clients),
        }
    }
}

/// Who has most of what a GPU is short of, and how many more have some.
fn holders(gpu: &Gpu, kind: ShortageKind, others: &[&Share]) -> (Vec<Holder>, usize) {
    let amount = |share: &Share| {
        let part = share.gpus.iter().find(|part| part.gpu == gpu.uuid)?;
        Some(match kind {
            ShortageKind::Memory { .. } => (part.memory.mib(), part.memory.to_string()),
            ShortageKind::Threads { .. } => {
                (share.all_threads(), format!("{}%", percent(share.all_threads())))
            }
            ShortageKind::Clients { .. } => {
                (share.processes.get().into(), format!("{} slot(s)", share.processes))
            }
        })
    };
    let mut found: Vec<(u64, &Token, String)> = others
        .iter()
        .filter_map(|share| amount(share).map(|(size, has)| (size, &share.token, has)))
        .collect();
    found.sort_by_key(|(size, ..)| std::cmp::Reverse(*size));
    let more = found.len().saturating_sub(NAMED);
    let holder =
        |(_, token, has): (u64, &Token, String)| Holder { token: token.clone(), name: String::new(), has };
    (found.into_iter().take(NAMED).map(holder).collect(), more)
}

/// The refusal for a container that needs `count` of `gpus`; `elsewhere` are those it has not chosen but could.
pub(super) fn refusal(
    misfits: Vec<Misfit>,
    wanted: &Wanted,
    facts: Facts<'_>,
    gpus: &[&Gpu],
    count: usize,
    elsewhere: &[&Gpu],
) -> Refusal {
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
        _ => Refusal::NoRoom { shortages, fit: fit(wanted, facts, gpus, count, elsewhere) },
    }
}

/// What would fit. Every answer was tried; nothing is said where amounts differ from GPU to GPU.
fn fit(wanted: &Wanted, facts: Facts<'_>, gpus: &[&Gpu], count: usize, elsewhere: &[&Gpu]) -> Option<Fit> {
    if matches!(&wanted.memory, Memory::Amounts(MemoryAsk::PerGpu(_))) {
        return None;
    }
    let slices = |gpu: &Gpu| facts.config.policy.on(gpu).slices;
    let asked = |gpu: &Gpu| wanted.on(gpu, 0, slices(gpu)).ok();
    let goes = |gpu: &Gpu, ask: Option<Ask>| ask.is_some_and(|ask| check(gpu, ask, wanted, facts).is_ok());
    let enough =
        |ask: &dyn Fn(&Gpu) -> Option<Ask>| gpus.iter().filter(|gpu| goes(gpu, ask(gpu))).count() >= count;
    let roomy: Vec<&Gpu> = elsewhere.iter().copied().filter(|gpu| goes(gpu, asked(gpu))).collect();
    if roomy.len() >= count {
        return Some(Fit::Elsewhere(list(roomy.into_iter().take(NAMED.max(count)))));
    }
    let less = |number: NonZeroU32| (1..number.get()).rev().filter_map(NonZeroU32::new);
    let left = |gpu: &Gpu| Left::on(gpu, false, facts);
    if let Memory::Slices(number) = wanted.memory {
        let fewer = less(number)
            .find(|number| enough(&|gpu| wanted.slices_on(gpu, *number, slices(gpu)).ok()))
            .map(Fit::Slices);
        return fewer.or(Some(Fit::Nothing));
    }
    let mut amounts: Vec<MemoryQuantity> = gpus.iter().map(|gpu| left(gpu).memory).collect();
    amounts.sort_by_key(|memory| std::cmp::Reverse(*memory));
    let memory = amounts
        .into_iter()
        .filter(|memory| gpus.iter().all(|gpu| asked(gpu).is_some_and(|ask| *memory < ask.memory)))
        .find(|memory| enough(&|gpu| Some(Ask { memory: *memory, ..asked(gpu)? })))
        .map(Fit::Memory);
    let mut ceilings: Vec<Percentage> = gpus
        .iter()
        .map(|gpu| left(gpu))
        .filter(|left| left.threads_are_bounded)
        .map(|left| left.threads)
        .filter_map(|left| u32::try_from(left / u64::from(wanted.processes.get())).ok()?.try_into().ok())
        .collect();
    ceilings.sort_by_key(|threads| std::cmp::Reverse(*threads));
    let threads = || {
        ceilings
            .into_iter()
            .find(|threads| enough(&|gpu| Some(Ask { threads: *threads, ..asked(gpu)? })))
            .map(Fit::Threads)
    };
    let processes = || {
        less(wanted.processes)
            .find(|processes| enough(&|gpu| Some(Ask { processes: *processes, ..asked(gpu)? })))
            .map(Fit::Processes)
    };
    memory.or_else(threads).or_else(processes).or(Some(Fit::Nothing))
}

/// The refusal's sentence: one GPU at a time and who has it, what would fit, then where to look.
pub(super) fn sentence(shortages: &[Shortage], fit: Option<&Fit>) -> String {
    let mut parts: Vec<String> = shortages.iter().take(NAMED).map(ToString::to_string).collect();
    if shortages.len() > NAMED {
        parts.push(format!("nor has one of {} more GPUs", shortages.len() - NAMED));
    }
    parts.extend(fit.map(ToString::to_string));
    parts.push("see 'oci-mps shares'".to_owned());
    parts.join("; ")
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, kind, key, holders, more } = self;
        match kind {
            ShortageKind::Memory { left, asked } => {
                write!(f, "{gpu} has {left} left to share, {key} asks for {asked}")?;
            }
            ShortageKind::Threads { left, asked } => {
                let (left, asked) = (percent(*left), percent(*asked));
                write!(f, "{gpu} has {left}% of its threads left to share, {key} asks for {asked}%")?;
            }
            ShortageKind::Clients { left, asked } => {
                write!(f, "{gpu} has {left} MPS client slot(s) left, {key} takes {asked}")?;
            }
        }
        for (nth, holder) in holders.iter().enumerate() {
            let name = if holder.name.is_empty() { holder.token.as_str() } else { &holder.name };
            write!(f, "{}{name} has {}", if nth == 0 { " (" } else { ", " }, holder.has)?;
        }
        match (holders.is_empty(), more) {
            (true, _) => Ok(()),
            (false, 0) => f.write_str(")"),
            (false, more) => write!(f, ", {more} more the rest)"),
        }
    }
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elsewhere(gpus) => write!(f, "there is room on {gpus}"),
            Self::Memory(memory) => write!(f, "{memory} would fit"),
            Self::Slices(count) => write!(f, "{count} slice(s) would fit"),
            Self::Threads(threads) => write!(f, "{threads}% would fit"),
            Self::Processes(count) => write!(f, "{count} process(es) would fit"),
            Self::Nothing => f.write_str("nothing of it fits before somebody ends"),
        }
    }
}

/// Thousandths of a percent, as people write them.
#[expect(clippy::cast_precision_loss, reason = "printed only; far below 2^52")]
fn percent(thousandths: u64) -> f64 {
    thousandths as f64 / 1000.0
}
