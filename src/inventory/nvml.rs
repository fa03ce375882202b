//! GPUs as the driver knows them, through its management library.
//!
//! Nothing that a starting container runs may come here: the library takes milliseconds to load, and seconds where
//! the GPUs sleep.

use std::path::PathBuf;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml, cuda_driver_version_major, cuda_driver_version_minor};

use super::{InventoryError, Source, sorted};
use crate::config::HostConfig;
use crate::gpu::{ComputeCapability, CudaVersion, Gpu, Inventory, Uuid};
use crate::layout::Layout;
use crate::quantity::MemoryQuantity;

/// The NVIDIA driver of this host.
#[derive(Clone, Debug)]
pub struct Driver {
    /// Both for the advice to somebody who has no driver.
    file: PathBuf,
    config: PathBuf,
}

impl Driver {
    /// The driver, with what its absence is explained by.
    pub fn new(layout: &Layout, config: &HostConfig) -> Self {
        Self { file: config.inventory.file.clone(), config: layout.config().to_owned() }
    }

    fn absent(&self, message: String) -> InventoryError {
        InventoryError::Driver { message, file: self.file.clone(), config: self.config.clone() }
    }
}

impl Source for Driver {
    fn read(&self) -> Result<Inventory, InventoryError> {
        let nvml = Nvml::init().map_err(|error| self.absent(plainly(&error)))?;
        let count = nvml.device_count().map_err(|error| self.absent(plainly(&error)))?;
        let gpus = (0..count)
            .filter_map(|index| device(&nvml, index).transpose())
            .map(|device| device.and_then(|(index, device)| describe(index, &device)))
            .collect::<Result<Vec<Gpu>, _>>()?;
        if gpus.is_empty() {
            return Err(InventoryError::None {
                who: "the NVIDIA driver".to_owned(),
                advice: Some("; see `nvidia-smi -L`".to_owned()),
            });
        }
        sorted(Inventory { cuda: cuda(&nvml), gpus })
            .map_err(|what| self.absent(format!("it names two GPUs with the {what}")))
    }
}

/// What one process takes of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUse {
    /// The GPU.
    pub gpu: Uuid,
    /// The process, by the host's number.
    pub pid: i32,
    /// Device memory; nothing where the driver does not tell.
    pub memory: Option<MemoryQuantity>,
}

/// Every process that computes on a GPU: MPS clients each with their own memory, and the servers too (measured on an
/// H200, driver 580.159: clients are listed with their host pids).
///
/// # Errors
/// Where there is no driver, or it does not answer.
pub fn use_by_process() -> Result<Vec<ProcessUse>, NvmlError> {
    let nvml = Nvml::init()?;
    let mut used = Vec::new();
    for index in 0..nvml.device_count()? {
        let device = nvml.device_by_index(index)?;
        let Ok(gpu) = Uuid::try_from(device.uuid()?) else { continue };
        for process in device.running_compute_processes()? {
            let memory = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(MemoryQuantity::from_bytes(bytes)),
                UsedGpuMemory::Unavailable => None,
            };
            used.push(ProcessUse { gpu: gpu.clone(), pid: process.pid.cast_signed(), memory });
        }
    }
    Ok(used)
}

/// The GPU of that index; none where it is there but out of order, so that the others can still be shared.
fn device(nvml: &Nvml, index: u32) -> Result<Option<(u32, Device<'_>)>, InventoryError> {
    match nvml.device_by_index(index) {
        Ok(device) => Ok(Some((index, device))),
        // nvmlDeviceGetHandleByIndex: counted, but not usable by this caller
        Err(
            NvmlError::GpuLost | NvmlError::NoPermission | NvmlError::InsufficientPower | NvmlError::IrqIssue,
        ) => Ok(None),
        Err(error) => Err(silent(index, "handle")(error)),
    }
}

fn describe(index: u32, device: &Device<'_>) -> Result<Gpu, InventoryError> {
    let uuid = device.uuid().map_err(silent(index, "uuid"))?;
    let uuid = Uuid::try_from(uuid).map_err(|error| InventoryError::Silent {
        index,
        what: "uuid",
        message: error.to_string(),
    })?;
    let memory = device.memory_info().map_err(silent(index, "memory"))?;
    let compute_capability = capability(index, device)?;
    let cores = device.num_cores().map_err(silent(index, "number of cores"))?;
    Ok(Gpu {
        index,
        uuid,
        name: device.name().map_err(silent(index, "name"))?,
        memory: MemoryQuantity::from_bytes(memory.total),
        compute_capability,
        sms: cores / cores_per_sm(compute_capability),
        minor: device.minor_number().ok(),
        // an error is the answer of every GPU that cannot be cut
        mig: device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED),
    })
}

/// `NVML_DEVICE_MIG_ENABLE`
const MIG_ENABLED: u32 = 1;

fn capability(index: u32, device: &Device<'_>) -> Result<ComputeCapability, InventoryError> {
    let what = "compute capability";
    let version = device.cuda_compute_capability().map_err(silent(index, what))?;
    u32::try_from(version.major)
        .and_then(|major| Ok(ComputeCapability { major, minor: u32::try_from(version.minor)? }))
        .map_err(|error| InventoryError::Silent { index, what, message: error.to_string() })
}

/// How many CUDA cores make one SM. NVML counts cores but not SMs, so the quotient is needed (CUDA samples,
/// `_ConvertSMVer2Cores` in `Common/helper_cuda.h`: 128 for all since 8.6, and so for what is still to come).
fn cores_per_sm(capability: ComputeCapability) -> u32 {
    match (capability.major, capability.minor) {
        (0..=2, _) => 32,
        (3, _) => 192,
        (6 | 8, 0) | (7, _) => 64,
        _ => 128,
    }
}

/// What the driver supports; where it does not say, the least is assumed by whoever asks.
fn cuda(nvml: &Nvml) -> Option<CudaVersion> {
    let version = nvml.sys_cuda_driver_version().ok()?;
    Some(CudaVersion {
        major: u32::try_from(cuda_driver_version_major(version)).ok()?,
        minor: u32::try_from(cuda_driver_version_minor(version)).ok()?,
    })
}

fn silent(index: u32, what: &'static str) -> impl FnOnce(NvmlError) -> InventoryError {
    move |error| InventoryError::Silent { index, what, message: plainly(&error) }
}

/// What an administrator can do something about; the wrapper's words for the rest.
fn plainly(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => {
            "its library libnvidia-ml.so.1 is not here".to_owned()
        }
        NvmlError::LibRmVersionMismatch => {
            "the loaded kernel module and libnvidia-ml.so.1 are of different versions (reboot, or reload the module)"
                .to_owned()
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    // cores and SMs as NVIDIA's data sheets have them
    #[rstest]
    #[case::k80((3, 7), 2496, 13)]
    #[case::m40((5, 2), 3072, 24)]
    #[case::p100((6, 0), 3584, 56)]
    #[case::p40((6, 1), 3840, 30)]
    #[case::v100((7, 0), 5120, 80)]
    #[case::t4((7, 5), 2560, 40)]
    #[case::a100((8, 0), 6912, 108)]
    #[case::a10((8, 6), 9216, 72)]
    #[case::l4((8, 9), 7424, 58)]
    #[case::h200((9, 0), 16896, 132)]
    #[case::b200((10, 0), 18944, 148)]
    #[case::rtx_pro_6000((12, 0), 24064, 188)]
    fn sms_are_counted_by_their_cores(#[case] version: (u32, u32), #[case] cores: u32, #[case] sms: u32) {
        let capability = ComputeCapability { major: version.0, minor: version.1 };
        assert_eq!(cores / cores_per_sm(capability), sms);
    }
}
