//! Where programs are found. Never through `PATH`: an engine's hook has none, and a user's is not to be trusted.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::kernel;
use crate::layout::Owner;

/// What of the host matters here. The default is the host itself; tests bring their own.
#[derive(Clone, Debug)]
pub struct Host {
    /// Where a program that is named without a path is looked for, in this order.
    pub program_directories: Vec<PathBuf>,
    /// A directory that is there where systemd is the manager (`sd_booted(3)`).
    pub systemd_runs: PathBuf,
    /// On whose behalf we work.
    pub owner: Owner,
}

impl Default for Host {
    fn default() -> Self {
        // the last ones are where NVIDIA's container images and GPU operator put the driver's programs
        let directories = [
            "/usr/bin",
            "/usr/sbin",
            "/bin",
            "/sbin",
            "/usr/local/bin",
            "/usr/local/sbin",
            "/usr/local/nvidia/bin",
            "/opt/nvidia/bin",
            "/run/nvidia/driver/usr/bin",
        ];
        Self {
            program_directories: directories.map(PathBuf::from).to_vec(),
            systemd_runs: PathBuf::from("/run/systemd/system"),
            owner: kernel::owner(),
        }
    }
}

impl Host {
    /// An absolute path as it is, a name from the fixed directories; only what can be executed.
    pub(super) fn find(&self, program: &Path) -> Option<PathBuf> {
        if program.is_absolute() {
            return is_executable(program).then(|| program.to_owned());
        }
        // a relative path would depend on who calls
        let name = program.file_name().filter(|name| Path::new(name) == program)?;
        self.program_directories.iter().map(|directory| directory.join(name)).find(|path| is_executable(path))
    }
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn programs_are_found_in_the_fixed_directories_only() {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (directory.path().join("first"), directory.path().join("second"));
        for (path, mode) in [(&first, 0o644), (&second, 0o755)] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("program"), "").unwrap();
            fs::set_permissions(path.join("program"), fs::Permissions::from_mode(mode)).unwrap();
        }
        let host = Host { program_directories: vec![first.clone(), second.clone()], ..Host::default() };
        assert_eq!(host.find(Path::new("program")), Some(second.join("program")), "the executable one");
        assert_eq!(host.find(&second.join("program")), Some(second.join("program")));
        assert_eq!(host.find(&first.join("program")), None);
        assert_eq!(host.find(Path::new("../second/program")), None);
        assert_eq!(host.find(Path::new("other")), None);
    }
}
