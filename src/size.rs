//! What may be asked for: the fields of a size, and the grammar of each.
//!
//! The same words size a container's annotations, the host's `[defaults]` and its `[profiles.…]`, so that a value
//! means the same wherever it stands.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::gpu::{NameError, Selector};
use crate::quantity::{MemoryQuantity, Percentage, QuantityError};

/// The fields of a [`Size`], by the names that users write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Field {
    /// `memory`
    Memory,
    /// `threads`
    Threads,
    /// `gpu`
    Gpu,
    /// `slices`
    Slices,
    /// `processes`
    Processes,
    /// `priority`
    Priority,
    /// `ipc`
    Ipc,
}

/// What was asked for. A field that is not set was not mentioned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// On each chosen GPU.
    pub memory: Option<MemoryAsk>,
    /// Ceiling on the share of SMs.
    pub threads: Option<Percentage>,
    /// Which GPUs.
    pub gpu: Option<GpuChoice>,
    /// So many of the slices that the host cuts a GPU into.
    pub slices: Option<NonZeroU32>,
    /// How many CUDA processes will run.
    pub processes: Option<NonZeroU32>,
    /// Their priority.
    pub priority: Option<Priority>,
    /// Whose IPC namespace the container lives in.
    pub ipc: Option<Ipc>,
}

/// Memory as it was asked for: one amount for every chosen GPU, or one for each in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryAsk {
    /// The same on each.
    Each(MemoryAmount),
    /// Two or more, one for each chosen GPU.
    PerGpu(Vec<MemoryAmount>),
}

/// An amount that may depend on the GPU's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryAmount {
    /// So much.
    Exactly(MemoryQuantity),
    /// That part of the GPU's memory.
    Part(Percentage),
}

/// Which GPUs were asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuChoice {
    /// So many, whichever have room.
    Auto(NonZeroU32),
    /// These, in this order.
    These(Vec<Selector>),
}

/// `CUDA_MPS_CLIENT_PRIORITY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// 0
    #[default]
    Normal,
    /// 1
    BelowNormal,
}

/// Whose IPC namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ipc {
    /// The host's, with its `/dev/shm`.
    Host,
    /// What the engine gave the container.
    Private,
}

/// Why a value is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// An amount outside its grammar.
    #[error(transparent)]
    Quantity(#[from] QuantityError),
    /// Not the name of a GPU.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Not one of the few words that are known.
    #[error("{given:?} is not known; write {known}")]
    Word {
        /// The text as it was given.
        given: String,
        /// What would be taken.
        known: &'static str,
    },
    /// Not a whole number of at least 1.
    #[error("{given:?} is not a number of {what}; write a whole number of at least 1")]
    Count {
        /// The text as it was given.
        given: String,
        /// What is counted.
        what: &'static str,
    },
    /// One GPU named twice.
    #[error("{given:?} names GPU {selector} twice; name each GPU once")]
    Twice {
        /// The text as it was given.
        given: String,
        /// The one that stands there twice.
        selector: Selector,
    },
}

impl Field {
    /// All of them, as the contract lists them.
    pub const ALL: [Self; 7] =
        [Self::Memory, Self::Threads, Self::Gpu, Self::Slices, Self::Processes, Self::Priority, Self::Ipc];

    /// As it is written after `oci-mps/` and in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Threads => "threads",
            Self::Gpu => "gpu",
            Self::Slices => "slices",
            Self::Processes => "processes",
            Self::Priority => "priority",
            Self::Ipc => "ipc",
        }
    }

    /// The field of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.name() == name)
    }
}

impl Size {
    /// Sets one field from its text.
    ///
    /// # Errors
    /// Where the text is outside the field's grammar; the size is then as it was.
    pub fn set(&mut self, field: Field, given: &str) -> Result<(), ValueError> {
        match field {
            Field::Memory => self.memory = Some(given.parse()?),
            Field::Threads => self.threads = Some(given.parse()?),
            Field::Gpu => self.gpu = Some(given.parse()?),
            Field::Slices => self.slices = Some(parse_count(given, "slices")?),
            Field::Processes => self.processes = Some(parse_count(given, "processes")?),
            Field::Priority => self.priority = Some(given.parse()?),
            Field::Ipc => self.ipc = Some(given.parse()?),
        }
        Ok(())
    }

    /// Whether a field was mentioned.
    pub fn has(&self, field: Field) -> bool {
        match field {
            Field::Memory => self.memory.is_some(),
            Field::Threads => self.threads.is_some(),
            Field::Gpu => self.gpu.is_some(),
            Field::Slices => self.slices.is_some(),
            Field::Processes => self.processes.is_some(),
            Field::Priority => self.priority.is_some(),
            Field::Ipc => self.ipc.is_some(),
        }
    }
}

/// A whole number of at least 1.
fn parse_count(given: &str, what: &'static str) -> Result<NonZeroU32, ValueError> {
    let digits_only = !given.is_empty() && given.bytes().all(|b| b.is_ascii_digit());
    digits_only
        .then(|| given.parse().ok())
        .flatten()
        .ok_or_else(|| ValueError::Count { given: given.to_owned(), what })
}

impl FromStr for MemoryAmount {
    type Err = ValueError;

    fn from_str(given: &str) -> Result<Self, ValueError> {
        if given.ends_with('%') {
            return Ok(Self::Part(given.parse()?));
        }
        Ok(Self::Exactly(given.parse()?))
    }
}

impl FromStr for MemoryAsk {
    type Err = ValueError;

    /// `8GiB`, `25%`, or `8GiB,4GiB` for two GPUs.
    fn from_str(given: &str) -> Result<Self, ValueError> {
        let amounts = given.split(',').map(str::parse).collect::<Result<Vec<MemoryAmount>, _>>()?;
        Ok(match amounts.as_slice() {
            [one] => Self::Each(*one),
            _ => Self::PerGpu(amounts),
        })
    }
}

impl FromStr for GpuChoice {
    type Err = ValueError;

    /// `auto`, `auto:2`, or GPUs by name: `0`, `0,1`, `GPU-…`.
    fn from_str(given: &str) -> Result<Self, ValueError> {
        if given == "auto" {
            return Ok(Self::Auto(NonZeroU32::MIN));
        }
        if let Some(count) = given.strip_prefix("auto:") {
            return Ok(Self::Auto(parse_count(count, "GPUs")?));
        }
        let mut selectors: Vec<Selector> = Vec::new();
        for name in given.split(',') {
            let selector = name.parse()?;
            if selectors.contains(&selector) {
                return Err(ValueError::Twice { given: given.to_owned(), selector });
            }
            selectors.push(selector);
        }
        Ok(Self::These(selectors))
    }
}

impl FromStr for Priority {
    type Err = ValueError;

    fn from_str(given: &str) -> Result<Self, ValueError> {
        match given {
            "normal" => Ok(Self::Normal),
            "below-normal" => Ok(Self::BelowNormal),
            _ => Err(ValueError::Word { given: given.to_owned(), known: "normal or below-normal" }),
        }
    }
}

impl Priority {
    /// As `CUDA_MPS_CLIENT_PRIORITY` takes it.
    pub const fn as_mps(self) -> &'static str {
        match self {
            Self::Normal => "0",
            Self::BelowNormal => "1",
        }
    }
}

impl FromStr for Ipc {
    type Err = ValueError;

    fn from_str(given: &str) -> Result<Self, ValueError> {
        match given {
            "host" => Ok(Self::Host),
            "private" => Ok(Self::Private),
            _ => Err(ValueError::Word { given: given.to_owned(), known: "host or private" }),
        }
    }
}

impl fmt::Display for MemoryAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(memory) => write!(f, "{memory}"),
            Self::Part(percentage) => write!(f, "{percentage}%"),
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn set(field: Field, given: &str) -> Result<Size, String> {
        let mut size = Size::default();
        size.set(field, given).map(|()| size).map_err(|error| error.to_string())
    }

    #[test]
    fn each_field_takes_what_the_contract_lists() {
        for (field, values) in [
            (Field::Memory, &["8GiB", "8192MiB", "8G", "25%", "8GiB,4GiB", "50%,8GiB"][..]),
            (Field::Threads, &["25", "25%", "12.5"]),
            (Field::Gpu, &["auto", "auto:2", "0", "0,1", "GPU-1a", "GPU-1A,1"]),
            (Field::Slices, &["1", "4"]),
            (Field::Processes, &["1", "48"]),
            (Field::Priority, &["normal", "below-normal"]),
            (Field::Ipc, &["host", "private"]),
        ] {
            for value in values {
                assert!(
                    set(field, value).unwrap_or_else(|error| panic!("{error}")).has(field),
                    "{field}={value}"
                );
            }
        }
    }

    #[rstest]
    #[case(Field::Memory, "8GiB,", "is empty")]
    #[case(Field::Memory, "8GiB,banana", "\"banana\"")]
    #[case(Field::Memory, "0%", "not a percentage")]
    #[case(Field::Gpu, "auto:0", "number of GPUs")]
    #[case(Field::Gpu, "auto:", "number of GPUs")]
    #[case(Field::Gpu, "0,0", "names GPU 0 twice")]
    #[case(Field::Gpu, "all", "names no GPU")]
    #[case(Field::Gpu, "MIG-1", "MIG device")]
    #[case(Field::Slices, "0", "at least 1")]
    #[case(Field::Slices, "1.5", "at least 1")]
    #[case(Field::Processes, "+1", "at least 1")]
    #[case(Field::Priority, "high", "write normal or below-normal")]
    #[case(Field::Ipc, "shareable", "write host or private")]
    fn anything_else_is_refused_and_says_why(#[case] field: Field, #[case] given: &str, #[case] says: &str) {
        let error = set(field, given).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
}
