//! A disk without room.

use std::fs;
use std::path::Path;
use std::process::Command;

/// A small file system of its own, full to the last byte, which goes with the test.
pub(super) struct Full<'a>(&'a Path);

impl<'a> Full<'a> {
    pub(super) fn mount(path: &'a Path) -> Self {
        fs::create_dir_all(path).unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k,mode=755", "tmpfs"])
            .arg(path)
            .status();
        assert!(mount.unwrap().success(), "mounting a tmpfs at {}", path.display());
        Self(path)
    }

    pub(super) fn fill(&self) {
        let mut size = 256 << 10;
        for number in 0.. {
            let written = fs::write(self.0.join(format!("fill.{number}")), vec![b'x'; size]);
            if written.is_err() {
                size /= 2;
            }
            if size == 0 || number == 64 {
                break;
            }
        }
        assert!(fs::write(self.0.join("more"), "x").is_err(), "it is full");
    }
}

impl Drop for Full<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}
