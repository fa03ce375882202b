//! Shares: what was promised to whom, as data.

use std::fmt;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::gpu::Uuid;
use crate::quantity::{MemoryQuantity, Percentage};
use crate::size::Priority;

/// The name of a share, left in the container's annotations so that its hooks find it again.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Token(String);

/// A text that is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not the token of a share; oci-mps writes it, leave the annotation out")]
pub struct TokenError {
    given: String,
}

/// What one container was promised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Its name.
    pub token: Token,
    /// On which GPUs, in the container's own numbering.
    pub gpus: Vec<GpuShare>,
    /// The ceiling on the share of SMs, for each of its processes.
    pub threads: Percentage,
    /// How many CUDA processes it may run; each takes one client slot on each of its GPUs.
    pub processes: NonZeroU32,
    /// Their priority.
    pub priority: Priority,
}

/// What one container was promised of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuShare {
    /// The GPU.
    pub gpu: Uuid,
    /// For all of the container's processes together.
    #[serde(rename = "memory_mib")]
    pub memory: MemoryQuantity,
}

/// What was promised of one GPU, to everybody together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Promised {
    /// Device memory.
    pub memory: MemoryQuantity,
    /// Ceilings on threads, added up, in thousandths of a percent.
    pub threads: u64,
    /// Client slots.
    pub clients: u32,
}

impl Promised {
    /// What all of these shares promise of that GPU.
    pub fn of<'a>(shares: impl IntoIterator<Item = &'a Share>, gpu: &Uuid) -> Self {
        shares.into_iter().fold(Self::default(), |sum, share| {
            let Some(part) = share.gpus.iter().find(|part| part.gpu == *gpu) else { return sum };
            Self {
                memory: sum.memory.plus(part.memory),
                threads: sum.threads + share.all_threads(),
                clients: sum.clients.saturating_add(share.processes.get()),
            }
        })
    }
}

impl Share {
    /// The ceilings of all its processes together, in thousandths of a percent: MPS limits each process by itself.
    pub fn all_threads(&self) -> u64 {
        u64::from(self.threads.thousandths()) * u64::from(self.processes.get())
    }
}

impl Token {
    /// 32 hexadecimal digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Token {
    type Error = TokenError;

    fn try_from(given: String) -> Result<Self, TokenError> {
        let is_token = given.len() == 32 && given.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if is_token { Ok(Self(given)) } else { Err(TokenError { given }) }
    }
}

impl From<Token> for String {
    fn from(token: Token) -> Self {
        token.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_on_one_gpu_add_up_and_others_do_not_count() {
        let uuid = |n: u8| Uuid::try_from(format!("GPU-0000000{n}-0000-0000-0000-000000000000")).unwrap();
        let share = |n: u8, gpus: &[u8], processes: u32| Share {
            token: Token::try_from(format!("{n:032}")).unwrap(),
            gpus: gpus
                .iter()
                .map(|n| GpuShare { gpu: uuid(*n), memory: MemoryQuantity::from_mib(100) })
                .collect(),
            threads: "12.5".parse().unwrap(),
            processes: NonZeroU32::new(processes).unwrap(),
            priority: Priority::Normal,
        };
        let shares = [share(1, &[0], 1), share(2, &[0, 1], 3), share(3, &[1], 1)];
        let promised = Promised::of(&shares, &uuid(0));
        assert_eq!((promised.memory.mib(), promised.threads, promised.clients), (200, 50_000, 4));
    }

    #[test]
    fn a_token_is_taken_only_as_it_is_made() {
        assert!(Token::try_from("0123456789abcdef0123456789abcdef".to_owned()).is_ok());
        for bad in ["", "0123456789ABCDEF0123456789ABCDEF", "../../../../../../../../etc/passwd"] {
            assert!(Token::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
