//! What NVML said in this boot, kept in a file for the containers that start.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{InventoryError, Source};
use crate::gpu::Inventory;
use crate::layout::{Layout, env};
use crate::{file, kernel};

/// Podman gives its hook 10 s in all.
const PATIENCE: Duration = Duration::from_secs(4);

/// Who the cache's contents are from; a file is never cached.
const SOURCE: &str = "nvml";

/// The inventory that `oci-mps gpus` left, or leaves when it is asked.
#[derive(Clone, Debug)]
pub struct Remembered {
    layout: Layout,
    program: PathBuf,
    patience: Duration,
}

/// The cache's document. Indices and device numbers may change from boot to boot, so it holds for one.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    boot: String,
    source: String,
    inventory: Inventory,
}

impl Remembered {
    /// What is remembered in `layout`; `program` is `oci-mps`, for when nothing is.
    pub fn new(layout: &Layout, program: &Path) -> Self {
        Self { layout: layout.clone(), program: program.to_owned(), patience: PATIENCE }
    }

    /// Another patience with the driver than 4 s.
    #[must_use]
    pub fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Has `oci-mps gpus` ask NVML and write down the answer.
    fn ask(&self) -> Result<(), InventoryError> {
        let run = |source| InventoryError::Run { program: self.program.clone(), source };
        let mut child = Command::new(&self.program)
            .args(["gpus", "--json"])
            .env(env::STATE_DIR, self.layout.state())
            .env(env::CONFIG, self.layout.config())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(run)?;
        let words = listen(&mut child);
        let status = wait(&mut child, self.patience).map_err(run)?;
        let Some(status) = status else {
            return Err(InventoryError::Slow { patience: self.patience, program: self.program.clone() });
        };
        if status.success() { Ok(()) } else { Err(self.failed(status, &words)) }
    }

    fn failed(&self, status: ExitStatus, words: &mpsc::Receiver<Vec<u8>>) -> InventoryError {
        // a process that outlives the program may still hold its stderr, and is not waited for
        let words = words.recv_timeout(Duration::from_millis(200)).unwrap_or_default();
        let words = String::from_utf8_lossy(&words);
        let last = words.lines().rfind(|line| !line.trim().is_empty());
        let message = last.map_or_else(
            || format!("{} gpus failed without a word ({status})", self.program.display()),
            |line| line.strip_prefix("oci-mps: ").unwrap_or(line).to_owned(),
        );
        InventoryError::Failed { message }
    }
}

impl Source for Remembered {
    fn read(&self) -> Result<Inventory, InventoryError> {
        if let Some(inventory) = read(&self.layout) {
            return Ok(inventory);
        }
        self.ask()?;
        read(&self.layout).ok_or_else(|| InventoryError::Missing {
            program: self.program.clone(),
            path: self.layout.inventory(),
        })
    }
}

/// Keeps an inventory of NVML's for the rest of this boot.
///
/// # Errors
/// Where the state directory cannot be made or written to.
pub(super) fn write(layout: &Layout, inventory: &Inventory) -> Result<(), InventoryError> {
    let keep = || -> io::Result<()> {
        let document =
            Document { boot: kernel::boot_id()?, source: SOURCE.to_owned(), inventory: inventory.clone() };
        let mut bytes = serde_json::to_vec_pretty(&document)?;
        bytes.push(b'\n');
        DirBuilder::new().recursive(true).mode(0o755).create(layout.state())?;
        file::replace_for_this_boot(&layout.inventory(), &bytes)
    };
    keep().map_err(|source| InventoryError::Write { path: layout.inventory(), source })
}

/// What was kept in this boot. A file that is missing, damaged or another oci-mps's is as good as none.
fn read(layout: &Layout) -> Option<Inventory> {
    let bytes = file::read(&layout.inventory()).ok()?;
    let document: Document = serde_json::from_slice(&bytes).ok()?;
    let usable = document.source == SOURCE
        && !document.inventory.gpus.is_empty()
        && kernel::boot_id().is_ok_and(|boot| boot == document.boot);
    usable.then_some(document.inventory)
}

/// Reads what the child says, so that it never waits for a reader.
fn listen(child: &mut Child) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(stderr) = child.stderr.take() {
        thread::spawn(move || sender.send(file::read_all(stderr).unwrap_or_default()));
    }
    receiver
}

/// Waits for the child to end; one that does not is killed, and `None`.
fn wait(child: &mut Child, patience: Duration) -> io::Result<Option<ExitStatus>> {
    const PAUSE: Duration = Duration::from_millis(2);
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Owner;
    use std::ffi::OsString;
    use std::fs;

    fn layout(state: &Path) -> Layout {
        Layout::new(Owner::Root, |name| (name == env::STATE_DIR).then(|| OsString::from(state)))
    }

    fn h200() -> Inventory {
        toml::from_str(
            "cuda = { major = 13, minor = 0 }\n[[gpu]]\nindex = 0\nname = \"NVIDIA H200\"\nmemory_mib = 143771\n\
             uuid = \"GPU-11111111-2222-3333-4444-555555555555\"\ncompute_capability = \"9.0\"\nsms = 132\nminor = 3\n",
        )
        .unwrap()
    }

    #[test]
    fn what_was_kept_comes_back_whole() {
        let state = tempfile::tempdir().unwrap();
        let layout = layout(&state.path().join("made/on/the/way"));
        write(&layout, &h200()).unwrap();
        assert_eq!(read(&layout), Some(h200()));
    }

    #[test]
    fn another_boot_another_source_and_damage_are_as_good_as_none() {
        let state = tempfile::tempdir().unwrap();
        let layout = layout(state.path());
        write(&layout, &h200()).unwrap();
        let whole = fs::read_to_string(layout.inventory()).unwrap();
        let boot = kernel::boot_id().unwrap();
        for damaged in [
            whole.replace(&boot, "00000000-0000-0000-0000-000000000000"),
            whole.replace("nvml", "file"),
            whole.replace("memory_mib", "memory"),
            whole[..whole.len() / 2].to_owned(),
            String::new(),
        ] {
            fs::write(layout.inventory(), damaged).unwrap();
            assert_eq!(read(&layout), None);
        }
        fs::remove_file(layout.inventory()).unwrap();
        fs::create_dir(layout.inventory()).unwrap();
        assert_eq!(read(&layout), None);
    }
}
