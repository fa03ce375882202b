//! Which GPUs the host has: from the driver, from a file that describes them, or from what was found out before.
//!
//! Starting containers ask [`current`], which carries no NVML: it reads the cache of this boot, and where there is
//! none it has `oci-mps gpus`, which asks [`probe`], make it.

mod cache;
mod file;
mod nvml;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::config::{HostConfig, SourceKind};
use crate::gpu::{Inventory, Uuid};
use crate::layout::Layout;

pub use cache::Remembered;
pub use file::StaticFile;
pub use nvml::{Driver, ProcessUse, use_by_process};

/// Who knows the GPUs.
pub trait Source {
    /// All GPUs, in the order of their indices; at least one.
    ///
    /// # Errors
    /// What stands in the way, and what would help.
    fn read(&self) -> Result<Inventory, InventoryError>;
}

/// Why the GPUs are not known.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// The inventory file is not readable.
    #[error(
        "cannot read the GPUs from {}: {source}; write them there, or set `source = \"nvml\"` under [inventory]",
        path.display()
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// The inventory file is not what the contract describes; the parser's message names the line.
    #[error("the GPUs in {} are not understood: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line, and what is wrong in it.
        message: String,
    },
    /// Something that no two GPUs share stands there twice.
    #[error("{} describes two GPUs with the {what}; give each its own", path.display())]
    Twice {
        /// The file.
        path: PathBuf,
        /// `index 0` or `uuid GPU-…`.
        what: String,
    },
    /// A GPU of no size.
    #[error("{} gives GPU {index} {key} = {given}; write what `nvidia-smi -q` or the data sheet says", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// The GPU's index.
        index: u32,
        /// `memory_mib` or `sms`.
        key: &'static str,
        /// What stands there.
        given: u64,
    },
    /// No GPU at all.
    #[error("{who} knows no GPU{advice}", advice = advice.as_deref().unwrap_or_default())]
    None {
        /// The file or the driver.
        who: String,
        /// What to do, after a semicolon.
        advice: Option<String>,
    },
    /// The driver's management library cannot be used.
    #[error(
        "the NVIDIA driver cannot be asked for its GPUs: {message}; install or mend the driver, or \
         describe the GPUs in {} and set `source = \"file\"` under [inventory] in {}",
        file.display(),
        config.display()
    )]
    Driver {
        /// What the library, or its absence, said.
        message: String,
        /// Where the GPUs could be described.
        file: PathBuf,
        /// The host's configuration.
        config: PathBuf,
    },
    /// The driver answered, but not about one of the GPUs.
    #[error("GPU {index} does not say its {what}: {message}; see `nvidia-smi -i {index} -q`")]
    Silent {
        /// The GPU's index.
        index: u32,
        /// What it was asked for.
        what: &'static str,
        /// What the driver said.
        message: String,
    },
    /// What was found out could not be kept for the containers that start.
    #[error("cannot write the inventory {}: {source}; the directory must be writable", path.display())]
    Write {
        /// The cache.
        path: PathBuf,
        /// What the file system said.
        source: io::Error,
    },
    /// The program that asks the driver could not be started or watched.
    #[error("cannot run {} to find the GPUs: {source}", program.display())]
    Run {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The program that asks the driver failed; the message is its own.
    #[error("{message}")]
    Failed {
        /// The last line that it wrote.
        message: String,
    },
    /// The driver takes too long, as it may where it has to wake every GPU first.
    #[error(
        "the GPUs did not answer within {} s; run `{} gpus` once, which waits for them, and try again (nvidia-persistenced \
         keeps them awake)",
        patience.as_secs(),
        program.display()
    )]
    Slow {
        /// How long it was waited.
        patience: Duration,
        /// The program.
        program: PathBuf,
    },
    /// The program ended well and left nothing.
    #[error("{} gpus left no inventory in {}; are both of one oci-mps?", program.display(), path.display())]
    Missing {
        /// The program.
        program: PathBuf,
        /// Where the inventory was expected.
        path: PathBuf,
    },
}

/// The inventory for a container that starts: the file, or what NVML said in this boot. `program` is `oci-mps`, which
/// is started where nobody asked NVML before.
///
/// # Errors
/// Where nobody knows the GPUs; the container cannot be given one then.
pub fn current(layout: &Layout, config: &HostConfig, program: &Path) -> Result<Inventory, InventoryError> {
    match config.inventory.source {
        // read each time: the file is its own cache, and a change to it must be seen at once
        SourceKind::File => StaticFile::new(&config.inventory.file).read(),
        SourceKind::Nvml => Remembered::new(layout, program).read(),
    }
}

/// The inventory for somebody who has time: the file, or what NVML says now, which is kept for [`current`].
///
/// # Errors
/// Where nobody knows the GPUs, or what was found cannot be kept.
pub fn probe(layout: &Layout, config: &HostConfig) -> Result<Inventory, InventoryError> {
    match config.inventory.source {
        SourceKind::File => StaticFile::new(&config.inventory.file).read(),
        SourceKind::Nvml => {
            let inventory = Driver::new(layout, config).read()?;
            cache::write(layout, &inventory)?;
            Ok(inventory)
        }
    }
}

/// Puts the GPUs in order.
///
/// # Errors
/// What two of them have in common though no two GPUs do.
fn sorted(mut inventory: Inventory) -> Result<Inventory, String> {
    inventory.gpus.sort_by_key(|gpu| gpu.index);
    if let Some(pair) = inventory.gpus.windows(2).find(|pair| pair[0].index == pair[1].index) {
        return Err(format!("index {}", pair[0].index));
    }
    let mut uuids: Vec<&Uuid> = inventory.gpus.iter().map(|gpu| &gpu.uuid).collect();
    uuids.sort();
    match uuids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("uuid {}", pair[0])),
        None => Ok(inventory),
    }
}
