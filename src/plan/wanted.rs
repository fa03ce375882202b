//! What is wanted once the profile and the host's defaults have filled in what the annotations leave out.

use std::num::NonZeroU32;

use super::Refusal;
use crate::config::HostConfig;
use crate::gpu::Gpu;
use crate::layout::ANNOTATION_PREFIX;
use crate::quantity::{MemoryQuantity, Percentage};
use crate::request::Request;
use crate::size::{Field, GpuChoice, Ipc, MemoryAmount, MemoryAsk, Priority, Size};

/// Every field, decided. The memory still depends on the GPU's size.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) memory: Memory,
    threads: Percentage,
    pub(super) gpu: GpuChoice,
    pub(super) processes: NonZeroU32,
    pub(super) priority: Priority,
    pub(super) ipc: Ipc,
    /// Whether the container itself, or the profile it names, asks for that IPC namespace.
    pub(super) ipc_is_asked: bool,
    pub(super) in_pod: bool,
    names: [(Field, String); 5],
}

/// How much memory on each chosen GPU.
#[derive(Debug)]
pub(super) enum Memory {
    Amounts(MemoryAsk),
    /// So many of as many as the GPU is cut into.
    Slices(NonZeroU32),
}

/// What is asked of one GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) memory: MemoryQuantity,
    /// For each process.
    pub(super) threads: Percentage,
    pub(super) processes: NonZeroU32,
    /// Whether the memory was asked for in slices.
    pub(super) in_slices: bool,
}

/// One place where a size can stand: what it says, and what to call it.
struct Layer<'a> {
    size: &'a Size,
    name: Box<dyn Fn(Field) -> String + 'a>,
    is_asked: bool,
}

impl Wanted {
    pub(super) fn of(request: &Request, config: &HostConfig) -> Result<Self, Refusal> {
        refuse_more_than_profiles(request, config)?;
        let layers = layers(request, config)?;
        let first = |field: Field| layers.iter().find(|layer| layer.size.has(field));
        let name = |field: Field| {
            first(field).map_or_else(|| format!("{ANNOTATION_PREFIX}{field}"), |layer| (layer.name)(field))
        };
        // The innermost layer that says anything of them decides about memory and threads together, else a default
        // of slices would come between a container's own memory and its threads.
        let sized = layers.iter().find(|layer| {
            [Field::Slices, Field::Memory, Field::Threads].into_iter().any(|field| layer.size.has(field))
        });
        let (memory, threads) = if let Some(count) = sized.and_then(|layer| layer.size.slices) {
            (Memory::Slices(count), Percentage::WHOLE)
        } else {
            let memory = layers.iter().find_map(|layer| layer.size.memory.clone());
            let memory = memory.ok_or_else(|| Refusal::NoMemory { key: asking_key(request) })?;
            let threads = layers.iter().find_map(|layer| layer.size.threads);
            (Memory::Amounts(memory), threads.unwrap_or(Percentage::WHOLE))
        };
        let memory_field = if matches!(memory, Memory::Slices(_)) { Field::Slices } else { Field::Memory };
        let pick = |field: Field| first(field).map(|layer| layer.size);
        Ok(Self {
            memory,
            threads,
            gpu: pick(Field::Gpu)
                .and_then(|size| size.gpu.clone())
                .unwrap_or(GpuChoice::Auto(NonZeroU32::MIN)),
            processes: pick(Field::Processes).and_then(|size| size.processes).unwrap_or(NonZeroU32::MIN),
            priority: pick(Field::Priority).and_then(|size| size.priority).unwrap_or_default(),
            ipc: pick(Field::Ipc).and_then(|size| size.ipc).unwrap_or(config.container.ipc),
            ipc_is_asked: first(Field::Ipc).is_some_and(|layer| layer.is_asked),
            in_pod: request.in_pod,
            names: [
                (Field::Memory, name(memory_field)),
                (
                    Field::Threads,
                    name(if memory_field == Field::Slices { Field::Slices } else { Field::Threads }),
                ),
                (Field::Gpu, name(Field::Gpu)),
                (Field::Processes, name(Field::Processes)),
                (Field::Ipc, name(Field::Ipc)),
            ],
        })
    }

    /// Who says that field: an annotation, or a line of the configuration.
    pub(super) fn name(&self, field: Field) -> String {
        let found = self.names.iter().find(|(known, _)| *known == field);
        found.map_or_else(|| format!("{ANNOTATION_PREFIX}{field}"), |(_, name)| name.clone())
    }

    /// How many amounts of memory were named; nothing where one counts for every GPU.
    pub(super) fn amounts(&self) -> Option<usize> {
        match &self.memory {
            Memory::Amounts(MemoryAsk::PerGpu(amounts)) => Some(amounts.len()),
            _ => None,
        }
    }

    /// What it asks of the `nth` of its GPUs, if that is this one, which is cut into so many slices. Rounded down.
    pub(super) fn on(&self, gpu: &Gpu, nth: usize, slices: NonZeroU32) -> Result<Ask, Refusal> {
        let amount = match &self.memory {
            Memory::Slices(count) => return self.slices_on(gpu, *count, slices),
            Memory::Amounts(MemoryAsk::Each(amount)) => Some(amount),
            Memory::Amounts(MemoryAsk::PerGpu(amounts)) => amounts.get(nth),
        };
        let memory = match amount {
            Some(MemoryAmount::Exactly(memory)) => *memory,
            Some(MemoryAmount::Part(percentage)) => gpu.memory.part(*percentage),
            None => MemoryQuantity::ZERO,
        };
        Ok(Ask { memory, threads: self.threads, processes: self.processes, in_slices: false })
    }

    /// So many slices of this GPU.
    pub(super) fn slices_on(&self, gpu: &Gpu, count: NonZeroU32, of: NonZeroU32) -> Result<Ask, Refusal> {
        let threads = Percentage::of_parts(count.get(), of).ok_or_else(|| Refusal::TooManySlices {
            key: self.name(Field::Memory),
            asked: count.get(),
            gpu: gpu.to_string(),
            slices: of.get(),
        })?;
        let memory = gpu.memory.split(of).times(count.get());
        Ok(Ask { memory, threads, processes: self.processes, in_slices: true })
    }
}

/// From the container's own words to the host's.
fn layers<'a>(request: &'a Request, config: &'a HostConfig) -> Result<Vec<Layer<'a>>, Refusal> {
    let own = |field: Field| request.key_of(field).unwrap_or(field.name()).to_owned();
    let mut layers = vec![Layer { size: &request.size, name: Box::new(own), is_asked: true }];
    if let Some(name) = &request.profile {
        let size = config
            .profiles
            .get(name)
            .ok_or_else(|| Refusal::NoSuchProfile { name: name.clone(), have: profiles(config) })?;
        let of_profile = move |field: Field| format!("[profiles.{name}] {field}");
        layers.push(Layer { size, name: Box::new(of_profile), is_asked: true });
    }
    let of_defaults = |field: Field| format!("[defaults] {field}");
    layers.push(Layer { size: &config.defaults, name: Box::new(of_defaults), is_asked: false });
    Ok(layers)
}

fn refuse_more_than_profiles(request: &Request, config: &HostConfig) -> Result<(), Refusal> {
    if !config.policy.only_profiles {
        return Ok(());
    }
    let own = Field::ALL.into_iter().find_map(|field| request.key_of(field));
    match (own, &request.profile) {
        (Some(key), _) => Err(Refusal::OnlyProfiles { key: key.to_owned(), have: profiles(config) }),
        (None, _) => Ok(()),
    }
}

/// `there are large and small`, for somebody who named another.
fn profiles(config: &HostConfig) -> String {
    match config.profiles.keys().cloned().collect::<Vec<_>>().as_slice() {
        [] => "the configuration has none".to_owned(),
        [only] => format!("there is {only}"),
        [others @ .., last] => format!("there are {} and {last}", others.join(", ")),
    }
}

/// The annotation by which this container became an MPS client.
fn asking_key(request: &Request) -> String {
    let own = Field::ALL.into_iter().find_map(|field| request.key_of(field));
    own.map_or_else(|| format!("{ANNOTATION_PREFIX}profile"), ToOwned::to_owned)
}
