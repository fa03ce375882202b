//! `containerd-shim-mps-v2` as containerd starts it, in front of a shim that records what reaches it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const SHIM: &str = env!("CARGO_BIN_EXE_containerd-shim-mps-v2");
const RUNTIME: &str = env!("CARGO_BIN_EXE_oci-mps-runtime");
const START: &[&str] = &["-namespace", "default", "-address", "/run/c.sock", "-id", "c1", "start"];

/// A directory with the real shim's stand-in.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new(shim: &str) -> Self {
        let host = Self { directory: tempfile::tempdir().unwrap() };
        host.program("real/containerd-shim-runc-v2", shim);
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn program(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn command(&self, shim: impl AsRef<Path>) -> Command {
        let search =
            std::env::join_paths([&self.path("real"), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
        let mut command = Command::new(shim.as_ref());
        command
            .env("OCI_MPS_STATE_DIR", self.path("state"))
            .env("OCI_MPS_CONFIG", self.path("config.toml"))
            .env("PATH", search)
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(SHIM).args(arguments).output().unwrap()
    }

    fn link(&self) -> PathBuf {
        fs::read_link(self.path("state/bin/runc")).unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_real_shim_is_started_with_our_runc_in_front() {
    let host = Host::new("#!/bin/sh\nprintf '%s\\n' \"$@\" \"$PATH\"\ncat\nexit 7\n");
    fs::write(host.path("stdin"), "from containerd").unwrap();
    let output =
        host.command(SHIM).args(START).stdin(fs::File::open(host.path("stdin")).unwrap()).output().unwrap();
    let search =
        format!("{}:{}:/usr/bin:/bin", host.path("state/bin").display(), host.path("real").display());
    assert_eq!(text(&output.stdout), format!("{}\n{search}\nfrom containerd", START.join("\n")));
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(host.link(), fs::canonicalize(RUNTIME).unwrap());
    assert_eq!(fs::metadata(host.path("state/bin")).unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn what_the_shim_finds_as_runc_is_oci_mps_runtime_and_behind_it_the_real_one() {
    let host = Host::new("#!/bin/sh\nreadlink -f \"$(command -v runc)\"\nexec runc state c1\n");
    let runc = host.program("real/x-runc", "#!/bin/sh\necho \"$0 $*; $PATH\"\n");
    fs::write(host.path("config.toml"), "[runtime]\npath = \"x-runc\"\n").unwrap();
    let output = host.run(START);
    let real = host.path("real");
    assert_eq!(
        text(&output.stdout),
        format!(
            "{}\n{} state c1; {}:/usr/bin:/bin\n",
            fs::canonicalize(RUNTIME).unwrap().display(),
            runc.display(),
            real.display()
        ),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn many_at_once_see_one_whole_link() {
    let host = Host::new("#!/bin/sh\nexec readlink \"${PATH%%:*}/runc\"\n");
    let children: Vec<_> =
        (0..20).map(|_| host.command(SHIM).args(START).stdout(Stdio::piped()).spawn().unwrap()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(text(&output.stdout).trim(), fs::canonicalize(RUNTIME).unwrap().to_str().unwrap());
    }
    assert_eq!(fs::read_dir(host.path("state/bin")).unwrap().count(), 1);
}

#[test]
fn a_link_of_an_older_installation_is_corrected() {
    let host = Host::new("#!/bin/sh\n");
    fs::create_dir_all(host.path("state/bin")).unwrap();
    std::os::unix::fs::symlink("/old/oci-mps-runtime", host.path("state/bin/runc")).unwrap();
    assert!(host.run(START).status.success());
    assert_eq!(host.link(), fs::canonicalize(RUNTIME).unwrap());
}

#[test]
fn without_the_link_nothing_is_started_but_everything_can_be_cleaned_up() {
    let host = Host::new("#!/bin/sh\necho reached\n");
    fs::write(host.path("state"), "in the way").unwrap();
    let output = host.run(START);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("oci-mps: cannot make the link"), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "");
    for line in [&["-id", "c1", "-bundle", "/b", "delete"][..], &["-info"], &["-v"]] {
        assert_eq!(text(&host.run(line).stdout), "reached\n", "{line:?}");
    }
}

#[test]
fn a_shim_that_leads_back_to_us_is_an_error_and_no_circle() {
    let host = Host::new("");
    fs::remove_file(host.path("real/containerd-shim-runc-v2")).unwrap();
    for name in ["containerd-shim-runc-v2", "containerd-shim-mps-v2"] {
        fs::copy(SHIM, host.path("real").join(name)).unwrap();
    }
    fs::copy(RUNTIME, host.path("real/oci-mps-runtime")).unwrap();
    let output = host.command(host.path("real/containerd-shim-mps-v2")).args(START).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("leads back"), "{}", text(&output.stderr));
}

#[test]
fn the_real_shim_describes_itself() {
    let real = Path::new("/usr/bin/containerd-shim-runc-v2");
    assert!(real.exists(), "this test needs containerd: install it");
    let host = Host::new("");
    fs::remove_file(host.path("real/containerd-shim-runc-v2")).unwrap();
    let output = host.run(&["-v"]);
    let alone = Command::new(real).arg("-v").output().unwrap();
    assert_eq!(text(&output.stdout), text(&alone.stdout));
    assert!(text(&output.stdout).contains("containerd-shim-runc-v2"), "{}", text(&output.stdout));
}
