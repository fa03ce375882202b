//! The inventory as starting containers get it: from a file, from the cache, from a program that has to be asked.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use oci_mps::config::{HostConfig, SourceKind};
use oci_mps::inventory::{InventoryError, Remembered, Source, current, probe};
use oci_mps::kernel;
use oci_mps::layout::{Layout, Owner, env};

/// A state directory, and beside it a program in the place of `oci-mps`.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new(program: &str) -> Self {
        let host = Self { directory: tempfile::tempdir().unwrap() };
        fs::write(host.program(), format!("#!/bin/sh\necho asked >> {}\n{program}", host.asked().display()))
            .unwrap();
        fs::set_permissions(host.program(), fs::Permissions::from_mode(0o755)).unwrap();
        host
    }

    /// One whose program does what `oci-mps gpus --json` does.
    fn with_driver() -> Self {
        let boot = kernel::boot_id().unwrap();
        Self::new(&format!(
            "[ \"$*\" = 'gpus --json' ] || exit 2\nmkdir -p \"$OCI_MPS_STATE_DIR\"\n\
             cat > \"$OCI_MPS_STATE_DIR/gpus.json\" <<END\n{{\"boot\":\"{boot}\",\"source\":\"nvml\",\
             \"inventory\":{{\"gpu\":[{{\"index\":0,\"uuid\":\"GPU-11111111-2222-3333-4444-555555555555\",\
             \"name\":\"NVIDIA H200\",\"memory_mib\":143771,\"compute_capability\":\"9.0\",\"sms\":132}}]}}}}\nEND\n"
        ))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn program(&self) -> PathBuf {
        self.path("oci-mps")
    }

    fn asked(&self) -> PathBuf {
        self.path("asked")
    }

    fn times_asked(&self) -> usize {
        fs::read_to_string(self.asked()).map_or(0, |lines| lines.lines().count())
    }

    fn layout(&self) -> Layout {
        Layout::new(Owner::Root, |name| {
            let path = match name {
                env::STATE_DIR => self.path("state"),
                env::CONFIG => self.path("config.toml"),
                _ => return None,
            };
            Some(OsString::from(path))
        })
    }

    fn failure(&self) -> String {
        current(&self.layout(), &HostConfig::default(), &self.program()).unwrap_err().to_string()
    }
}

#[test]
fn the_driver_is_asked_once_in_a_boot() {
    let host = Host::with_driver();
    for _ in 0..3 {
        let inventory = current(&host.layout(), &HostConfig::default(), &host.program()).unwrap();
        assert_eq!(inventory.gpus[0].to_string(), "GPU 0 (NVIDIA H200)");
    }
    assert_eq!(host.times_asked(), 1);
}

#[test]
fn a_damaged_cache_is_made_anew() {
    let host = Host::with_driver();
    fs::create_dir(host.path("state")).unwrap();
    fs::write(host.layout().inventory(), "{").unwrap();
    current(&host.layout(), &HostConfig::default(), &host.program()).unwrap();
    assert_eq!(host.times_asked(), 1);
}

#[test]
fn a_file_is_read_each_time_and_no_program_is_asked() {
    let host = Host::new("exit 1");
    let mut config = HostConfig::default();
    config.inventory.source = SourceKind::File;
    config.inventory.file = host.path("gpus.toml");
    for sms in [132, 66] {
        let gpu = "[[gpu]]\nindex = 0\nuuid = \"GPU-11111111-2222-3333-4444-555555555555\"\nname = \"NVIDIA H200\"\n\
                   memory_mib = 143771\ncompute_capability = \"9.0\"";
        fs::write(host.path("gpus.toml"), format!("{gpu}\nsms = {sms}\n")).unwrap();
        assert_eq!(current(&host.layout(), &config, &host.program()).unwrap().gpus[0].sms, sms);
        assert_eq!(probe(&host.layout(), &config).unwrap().gpus[0].sms, sms);
    }
    assert_eq!(host.times_asked(), 0);
    assert!(!host.layout().inventory().exists());
}

#[test]
fn the_programs_last_words_are_the_error() {
    let host = Host::new("echo loading >&2; echo 'oci-mps: the driver is not loaded' >&2; echo >&2; exit 1");
    assert_eq!(host.failure(), "the driver is not loaded");
    assert!(Host::new("exit 3").failure().contains("failed without a word (exit status: 3)"));
    assert!(Host::new("kill -9 $$").failure().contains("failed without a word (signal: 9"));
}

#[test]
fn a_program_that_leaves_nothing_or_is_not_there_is_named() {
    let host = Host::new("exit 0");
    assert!(host.failure().contains("left no inventory in"), "{}", host.failure());
    fs::remove_file(host.program()).unwrap();
    let failure = host.failure();
    assert!(
        failure.contains(&host.program().display().to_string()) && failure.contains("cannot run"),
        "{failure}"
    );
}

#[test]
fn a_driver_that_does_not_answer_is_given_up_and_what_it_holds_open_is_not_waited_for() {
    let host = Host::new("sleep 60 & wait");
    let before = Instant::now();
    let error = Remembered::new(&host.layout(), &host.program())
        .patient(Duration::from_millis(100))
        .read()
        .unwrap_err();
    assert!(matches!(error, InventoryError::Slow { .. }), "{error}");
    assert!(before.elapsed() < Duration::from_secs(5));
    assert!(error.to_string().contains("oci-mps gpus` once"), "{error}");
}

#[test]
fn a_child_that_outlives_the_program_does_not_hold_the_container_up() {
    let host = Host::new("echo 'oci-mps: no' >&2; sleep 60 & exit 1");
    let before = Instant::now();
    let failure = host.failure();
    assert!(failure.contains("failed without a word"), "{failure}");
    assert!(before.elapsed() < Duration::from_secs(5));
}

#[test]
fn without_a_driver_it_is_said_what_to_install_or_write() {
    let host = Host::new("");
    match probe(&host.layout(), &HostConfig::default()) {
        Ok(inventory) => {
            assert!(!inventory.gpus.is_empty());
            assert!(host.layout().inventory().exists(), "kept for the containers");
        }
        Err(error) => {
            let error = error.to_string();
            for part in ["mend the driver", "/etc/oci-mps/gpus.toml", "source = \"file\"", "config.toml"] {
                assert!(error.contains(part), "{error}");
            }
            assert!(!Path::new(&host.layout().inventory()).exists());
        }
    }
}
