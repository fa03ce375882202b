//! The GPUs of a host, as data: what they are called, how large they are, what a client of them is given.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::quantity::{MemoryQuantity, Percentage};

/// A GPU's identity as the driver prints it: `GPU-` and 36 characters of a UUID, in lower case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Uuid(String);

/// How somebody names one GPU: by its index, by its UUID or by a prefix of the UUID that only one GPU has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// The index that the driver (and `nvidia-smi`) counts by.
    Index(u32),
    /// `GPU-` and at least one more character, lower case.
    Uuid(String),
}

/// A text that names no GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Neither an index nor the beginning of a UUID.
    #[error("{given:?} names no GPU; write an index (0), a UUID (GPU-…) or the beginning of one")]
    NotAGpu {
        /// The text as it was given.
        given: String,
    },
    /// A part of a GPU, which MPS limits do not reach yet.
    #[error("{given:?} is a MIG device, which oci-mps cannot share yet; name a whole GPU")]
    Mig {
        /// The text as it was given.
        given: String,
    },
}

/// A selector that does not lead to exactly one GPU of the inventory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// No GPU of the host is called so.
    #[error("there is no GPU {selector} here; this host has {have}")]
    Unknown {
        /// What was looked for.
        selector: Selector,
        /// What there is instead.
        have: String,
    },
    /// A prefix that several GPUs have.
    #[error("{selector} begins the UUID of {count} GPUs; give more of it")]
    Ambiguous {
        /// What was looked for.
        selector: Selector,
        /// How many GPUs answer to it.
        count: usize,
    },
}

/// CUDA's number for an architecture: `9.0` is Hopper, `7.0` Volta.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ComputeCapability {
    /// The generation.
    pub major: u32,
    /// Its variant.
    pub minor: u32,
}

/// The version of CUDA that the driver supports, `13.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CudaVersion {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// The index that the driver counts by.
    pub index: u32,
    /// Its identity.
    pub uuid: Uuid,
    /// The product's name, `NVIDIA H200`.
    pub name: String,
    /// All of its memory, as the driver reports it.
    #[serde(rename = "memory_mib")]
    pub memory: MemoryQuantity,
    /// Its architecture.
    pub compute_capability: ComputeCapability,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// The number of its device node, `/dev/nvidia<minor>`; the index where nobody knows better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Whether it is cut into MIG devices.
    #[serde(default)]
    pub mig: bool,
}

/// All GPUs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// What the driver supports, where it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<CudaVersion>,
    /// In the order of their indices.
    #[serde(default, rename = "gpu")]
    pub gpus: Vec<Gpu>,
}

impl Uuid {
    /// `GPU-…`, as the driver prints it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Gpu {
    /// The SMs that an MPS client sees under this thread percentage: rounded down to a multiple of 2, and never
    /// fewer than 8 (132 SMs: 33.3 percent gives 42, 25 gives 32, 5 and less give 8; measured on an H200).
    pub fn sms_at(&self, threads: Percentage) -> u32 {
        const LEAST: u32 = 8;
        if threads == Percentage::WHOLE {
            return self.sms;
        }
        let share = u64::from(self.sms) * u64::from(threads.thousandths());
        let exact = u32::try_from(share / u64::from(Percentage::WHOLE.thousandths())).unwrap_or(self.sms);
        (exact & !1).max(LEAST).min(self.sms)
    }

    /// What one CUDA context takes of a client's limit: about 30 MiB and 4 MiB for each SM that the client may use
    /// (measured on an H200: 514 MiB at 132 SMs, 271 at 66, 58 at 8).
    pub fn context_memory(&self, threads: Percentage) -> MemoryQuantity {
        MemoryQuantity::from_mib(30 + 4 * u64::from(self.sms_at(threads)))
    }

    /// How many MPS clients it takes at once: 16 before Volta, 48 since, 60 from CUDA 13.1 on (NVIDIA's MPS guide;
    /// the 49th was refused with CUDA 13.0 on an H200).
    pub fn client_slots(&self, cuda: Option<CudaVersion>) -> u32 {
        const VOLTA: ComputeCapability = ComputeCapability { major: 7, minor: 0 };
        const SIXTY_CLIENTS: CudaVersion = CudaVersion { major: 13, minor: 1 };
        match cuda {
            _ if self.compute_capability < VOLTA => 16,
            Some(cuda) if cuda >= SIXTY_CLIENTS => 60,
            _ => 48,
        }
    }

    /// The number of its device node.
    pub fn device_minor(&self) -> u32 {
        self.minor.unwrap_or(self.index)
    }
}

impl fmt::Display for Gpu {
    /// `GPU 0 (NVIDIA H200)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.index, self.name)
    }
}

impl Inventory {
    /// The one GPU that is called so.
    ///
    /// # Errors
    /// Where none or several are.
    pub fn select(&self, selector: &Selector) -> Result<&Gpu, SelectError> {
        let mut found = self.gpus.iter().filter(|gpu| selector.matches(gpu));
        match (found.next(), found.count()) {
            (Some(gpu), 0) => Ok(gpu),
            (Some(_), more) => Err(SelectError::Ambiguous { selector: selector.clone(), count: more + 1 }),
            (None, _) => Err(SelectError::Unknown { selector: selector.clone(), have: self.names() }),
        }
    }

    /// `GPU 0 (NVIDIA H200) and GPU 1 (NVIDIA H200)`, for somebody who named another.
    fn names(&self) -> String {
        let names: Vec<String> = self.gpus.iter().map(ToString::to_string).collect();
        match names.split_last() {
            None => "no GPU".to_owned(),
            Some((only, [])) => only.clone(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
        }
    }
}

impl Selector {
    /// Whether this GPU is meant (or, by a prefix, also meant).
    pub fn matches(&self, gpu: &Gpu) -> bool {
        match self {
            Self::Index(index) => gpu.index == *index,
            Self::Uuid(prefix) => gpu.uuid.as_str().starts_with(prefix.as_str()),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(prefix) => f.write_str(prefix),
        }
    }
}

impl FromStr for Selector {
    type Err = NameError;

    fn from_str(given: &str) -> Result<Self, NameError> {
        let not_a_gpu = || NameError::NotAGpu { given: given.to_owned() };
        if given.starts_with("MIG-") {
            return Err(NameError::Mig { given: given.to_owned() });
        }
        if let Some(rest) = given.strip_prefix("GPU-") {
            let is_uuid_text = |c: char| c.is_ascii_hexdigit() || c == '-';
            if rest.is_empty() || rest.len() > 36 || !rest.chars().all(is_uuid_text) {
                return Err(not_a_gpu());
            }
            return Ok(Self::Uuid(format!("GPU-{}", rest.to_ascii_lowercase())));
        }
        if given.is_empty() || !given.bytes().all(|b| b.is_ascii_digit()) {
            return Err(not_a_gpu());
        }
        given.parse().map(Self::Index).map_err(|_| not_a_gpu())
    }
}

impl TryFrom<String> for Uuid {
    type Error = NameError;

    fn try_from(given: String) -> Result<Self, NameError> {
        match given.parse() {
            Ok(Selector::Uuid(uuid)) if uuid.len() == "GPU-".len() + 36 => Ok(Self(uuid)),
            Err(mig @ NameError::Mig { .. }) => Err(mig),
            _ => Err(NameError::NotAGpu { given }),
        }
    }
}

impl From<Uuid> for String {
    fn from(uuid: Uuid) -> Self {
        uuid.0
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ComputeCapability {
    type Error = String;

    fn try_from(given: String) -> Result<Self, String> {
        given
            .split_once('.')
            .and_then(|(major, minor)| Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? }))
            .ok_or_else(|| format!("{given:?} is not a compute capability; write for example \"9.0\""))
    }
}

impl From<ComputeCapability> for String {
    fn from(capability: ComputeCapability) -> Self {
        capability.to_string()
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn h200(index: u32, uuid: &str) -> Gpu {
        Gpu {
            index,
            uuid: Uuid::try_from(uuid.to_owned()).unwrap(),
            name: "NVIDIA H200".to_owned(),
            memory: MemoryQuantity::from_mib(143_771),
            compute_capability: ComputeCapability { major: 9, minor: 0 },
            sms: 132,
            minor: None,
            mig: false,
        }
    }

    const A: &str = "GPU-11111111-2222-3333-4444-555555555555";
    const B: &str = "GPU-11117777-2222-3333-4444-555555555555";

    // shared measurements: H200, driver 580.159
    #[rstest]
    #[case("100", 132)]
    #[case("50", 66)]
    #[case("33.3", 42)]
    #[case("25", 32)]
    #[case("12.5", 16)]
    #[case("10", 12)]
    #[case("5", 8)]
    #[case("0.5", 8)]
    fn sms_are_predicted_as_the_driver_rounds_them(#[case] threads: &str, #[case] sms: u32) {
        assert_eq!(h200(0, A).sms_at(threads.parse().unwrap()), sms);
    }

    #[rstest]
    #[case("100", 514)]
    #[case("50", 271)]
    #[case("25", 145)]
    #[case("12.5", 87)]
    #[case("10", 72)]
    #[case("5", 58)]
    fn a_context_is_never_estimated_below_what_was_measured(#[case] threads: &str, #[case] measured: u64) {
        let estimate = h200(0, A).context_memory(threads.parse().unwrap()).mib();
        assert!((measured..=measured + measured / 10 + 15).contains(&estimate), "{estimate}");
    }

    #[test]
    fn a_gpu_is_found_by_index_uuid_and_unique_prefix_only() {
        let host = Inventory { cuda: None, gpus: vec![h200(0, A), h200(1, B)] };
        let select = |name: &str| host.select(&name.parse().unwrap()).map(|gpu| gpu.index);
        assert_eq!(select("1"), Ok(1));
        assert_eq!(select(A), Ok(0));
        assert_eq!(select("GPU-11117"), Ok(1));
        assert!(matches!(select("GPU-1111"), Err(SelectError::Ambiguous { count: 2, .. })));
        let unknown = select("7").unwrap_err().to_string();
        assert_eq!(
            unknown,
            "there is no GPU 7 here; this host has GPU 0 (NVIDIA H200) and GPU 1 (NVIDIA H200)"
        );
    }

    #[rstest]
    #[case("banana")]
    #[case("GPU-")]
    #[case("GPU-xyz")]
    #[case("-1")]
    #[case("99999999999")]
    #[case("")]
    fn other_names_are_refused(#[case] given: &str) {
        assert!(matches!(given.parse::<Selector>(), Err(NameError::NotAGpu { .. })));
    }

    #[test]
    fn a_mig_device_is_named_as_such() {
        let error = "MIG-11111111-2222-3333-4444-555555555555".parse::<Selector>().unwrap_err();
        assert!(error.to_string().contains("MIG device"));
    }

    #[test]
    fn client_slots_follow_architecture_and_driver() {
        let hopper = h200(0, A);
        let pascal = Gpu { compute_capability: ComputeCapability { major: 6, minor: 1 }, ..hopper.clone() };
        let cuda = |major, minor| Some(CudaVersion { major, minor });
        assert_eq!(hopper.client_slots(cuda(13, 0)), 48);
        assert_eq!(hopper.client_slots(cuda(13, 1)), 60);
        assert_eq!(hopper.client_slots(None), 48);
        assert_eq!(pascal.client_slots(cuda(13, 1)), 16);
    }
}
