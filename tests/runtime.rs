//! `oci-mps-runtime` as engines start it, in front of a runtime that records what reaches it, and of the real runc.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const RUNTIME: &str = env!("CARGO_BIN_EXE_oci-mps-runtime");

/// Records how it was called, and takes no part in anything.
const RECORDER: &str = r#"#!/bin/sh
[ -n "$RECORD" ] || exit 9
printf '%s\0' "$@" > "$RECORD/argv"
cat /proc/$$/environ > "$RECORD/environ"
pwd > "$RECORD/cwd"
echo $$ > "$RECORD/pid"
grep SigIgn /proc/$$/status > "$RECORD/ignored"
[ -t 0 ] || cat > "$RECORD/stdin"
{ cat <&3; } > "$RECORD/third" 2>/dev/null
echo "recorded $1"
exit 7
"#;

/// A directory with a runtime that records, a bundle and a configuration that leads to the one and knows no GPU.
struct Host {
    directory: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let host = Self { directory: tempfile::tempdir().unwrap() };
        program(&host.path("real/recorder"), RECORDER);
        fs::create_dir(host.path("bundle")).unwrap();
        host.spec("{}");
        host.configure(&format!("[runtime]\npath = \"{}\"\n", host.path("real/recorder").display()));
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn configure(&self, text: &str) {
        fs::write(self.path("config.toml"), text).unwrap();
    }

    fn spec(&self, text: &str) {
        fs::write(self.path("bundle/config.json"), text).unwrap();
    }

    /// A spec that asks for something that cannot be had.
    fn impossible_spec(&self) {
        self.spec(r#"{"ociVersion":"1.0.2","process":{"args":["x"],"cwd":"/"},"annotations":{"oci-mps/memory":"banana"}}"#);
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("OCI_MPS_CONFIG", self.path("config.toml"))
            .env("OCI_MPS_STATE_DIR", self.path("state"))
            .env("RECORD", self.directory.path())
            .current_dir(self.path("bundle"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(RUNTIME).args(arguments).output().unwrap()
    }

    fn recorded(&self, what: &str) -> Vec<u8> {
        fs::read(self.path(what)).unwrap()
    }

    fn reached(&self) -> bool {
        self.path("argv").exists()
    }
}

fn program(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// It ended with our words, and the real runtime was not reached.
fn assert_refused(host: &Host, output: &Output, words: &str) {
    let stderr = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("oci-mps: ") && stderr.contains(words), "{stderr}");
    assert_eq!(stderr.matches("oci-mps: ").count(), 1, "{stderr}");
    assert!(output.stdout.is_empty());
    assert!(!host.reached());
}

#[test]
fn the_real_runtime_is_the_same_process_with_the_same_everything() {
    let host = Host::new();
    fs::write(host.path("third-in"), "through the third descriptor").unwrap();
    fs::write(host.path("stdin-in"), "through standard input").unwrap();
    let arguments: Vec<OsString> =
        [&b"--root"[..], b"", b"create", b"--bundle=/b\xff\xfe", b"a b\n", b"--", b"\xf0"]
            .iter()
            .map(|bytes| OsString::from_vec(bytes.to_vec()))
            .collect();
    let child = host
        .command("/bin/sh")
        .args(["-c", "exec \"$0\" \"$@\" 3< ../third-in < ../stdin-in", RUNTIME])
        .args(&arguments)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();

    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"recorded --root\n");
    let argv: Vec<u8> = arguments.into_iter().flat_map(|word| [word.into_vec(), vec![0]].concat()).collect();
    assert_eq!(host.recorded("argv"), argv);
    assert_eq!(String::from_utf8(host.recorded("pid")).unwrap().trim(), pid.to_string());
    let cwd = fs::canonicalize(host.path("bundle")).unwrap();
    assert_eq!(String::from_utf8(host.recorded("cwd")).unwrap().trim(), cwd.to_str().unwrap());
    assert_eq!(host.recorded("stdin"), b"through standard input");
    assert_eq!(host.recorded("third"), b"through the third descriptor");
    let ignored = host.recorded("ignored");
    host.command(host.path("real/recorder")).status().unwrap();
    assert_eq!(ignored, host.recorded("ignored"), "the same signals as without us");
}

#[test]
fn the_environment_is_the_same_but_for_the_guard() {
    let host = Host::new();
    let output = host
        .command(RUNTIME)
        .env_clear()
        .env("OCI_MPS_CONFIG", host.path("config.toml"))
        .env("RECORD", host.directory.path())
        .env("ODD", OsString::from_vec(b"\xff = \n".to_vec()))
        .arg("state")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", stderr(&output));
    let environ = host.recorded("environ");
    let mut names: Vec<&[u8]> = environ
        .split(|byte| *byte == 0)
        .filter(|entry| !entry.is_empty())
        .map(|entry| entry.split(|byte| *byte == b'=').next().unwrap())
        .collect();
    names.sort_unstable();
    assert_eq!(names, [&b"OCI_MPS_CONFIG"[..], b"OCI_MPS_RUNTIME_PID", b"ODD", b"RECORD"]);
    assert!(environ.windows(9).any(|entry| entry == b"ODD=\xff = \n"));
}

#[test]
fn a_container_that_asks_for_nothing_passes_whatever_is_wrong_with_us() {
    for spec in ["{}", "not json", "", "{\"annotations\":{\"other/memory\":\"1GiB\"}}"] {
        let host = Host::new();
        host.spec(spec);
        assert_eq!(host.run(&["create", "--bundle", ".", "c1"]).status.code(), Some(7));
        assert_eq!(host.recorded("bundle/config.json"), spec.as_bytes());
        assert!(!host.path("state").exists(), "nothing made, nothing locked");
    }
}

#[test]
fn a_container_that_cannot_get_its_share_does_not_start() {
    let host = Host::new();
    host.impossible_spec();
    let before = host.recorded("bundle/config.json");
    let bundle = host.path("bundle");
    for line in [
        &["create", "--bundle", bundle.to_str().unwrap(), "c1"][..],
        &["run", "-b", ".", "c1"],
        &["create", "c1"],
        &["--new-switch", "create", "c1"],
    ] {
        assert_refused(&host, &host.run(line), "oci-mps/memory");
        assert_eq!(host.recorded("bundle/config.json"), before);
    }
}

#[test]
fn other_commands_pass_beside_such_a_container() {
    let host = Host::new();
    host.impossible_spec();
    for line in
        [&["start", "c1"][..], &["exec", "c1", "create"], &["delete", "--force", "create"], &["--version"]]
    {
        assert_eq!(host.run(line).status.code(), Some(7), "{line:?}");
    }
}

#[test]
fn engines_read_the_refusal_in_their_log() {
    let host = Host::new();
    host.impossible_spec();
    let log = host.path("log.json");
    fs::write(&log, "{\"level\":\"info\"}\n").unwrap();
    let json = ["--log", log.to_str().unwrap(), "--log-format", "json", "create", "c1"];
    let output = host.run(&json);
    assert_refused(&host, &output, "banana");
    let written = fs::read_to_string(&log).unwrap();
    let last: serde_json::Value = serde_json::from_str(written.lines().last().unwrap()).unwrap();
    assert!(written.starts_with("{\"level\":\"info\"}\n") && written.lines().count() == 2, "{written}");
    assert_eq!(last["level"], "error");
    assert_eq!(last["msg"].as_str().unwrap(), stderr(&output).trim_end());
    assert_eq!(last["time"].as_str().unwrap().len(), "2026-01-31T23:59:59Z".len());

    let log = host.path("log.txt");
    host.run(&["--log", log.to_str().unwrap(), "create", "c1"]);
    let written = fs::read_to_string(&log).unwrap();
    assert!(
        written.starts_with("time=\"20") && written.contains("Z\" level=error msg=\"oci-mps: "),
        "{written}"
    );
    assert_eq!(fs::metadata(&log).unwrap().permissions().mode() & 0o133, 0, "not for others to write");
}

#[test]
fn a_log_that_is_standard_error_says_it_once() {
    let host = Host::new();
    host.impossible_spec();
    assert_refused(&host, &host.run(&["--log", "/dev/stderr", "create", "c1"]), "banana");
}

#[test]
fn a_broken_configuration_stops_only_those_who_ask() {
    for broken in ["[polcy]\n", "banana", "[runtime]\npath = []", "\u{0}"] {
        let host = Host::new();
        host.configure(&format!("{}{broken}", fs::read_to_string(host.path("config.toml")).unwrap()));
        // where the configuration is past reading, the real runtime is the default one
        symlink("recorder", host.path("real/runc")).unwrap();
        let search =
            std::env::join_paths([&host.path("real"), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
        let create = |spec: &str| {
            host.spec(spec);
            host.command(RUNTIME).env("PATH", &search).args(["create", "c1"]).output().unwrap()
        };
        assert_refused(&host, &create(r#"{"annotations":{"oci-mps/memory":"1GiB"}}"#), "config.toml");
        assert_eq!(create("{}").status.code(), Some(7), "{broken:?}");
    }
}

#[test]
fn a_directory_for_a_configuration_stops_only_those_who_ask() {
    let host = Host::new();
    fs::remove_file(host.path("config.toml")).unwrap();
    fs::create_dir(host.path("config.toml")).unwrap();
    host.spec(r#"{"annotations":{"oci-mps/memory":"1GiB"}}"#);
    assert_refused(&host, &host.run(&["create", "c1"]), "cannot read the configuration");
}

#[test]
fn a_bundle_that_vanished_is_the_real_runtimes_to_report() {
    let host = Host::new();
    fs::remove_file(host.path("bundle/config.json")).unwrap();
    assert_eq!(host.run(&["create", "c1"]).status.code(), Some(7));
    fs::create_dir(host.path("bundle/config.json")).unwrap();
    assert_eq!(host.run(&["create", "c1"]).status.code(), Some(7));
    assert_eq!(host.run(&["create", "--bundle", "/nonexistent", "c1"]).status.code(), Some(7));
}

#[test]
fn a_spec_that_only_the_real_runtime_could_read_is_refused_without_waiting() {
    let host = Host::new();
    fs::remove_file(host.path("bundle/config.json")).unwrap();
    assert!(Command::new("mkfifo").arg(host.path("bundle/config.json")).status().unwrap().success());
    assert_refused(&host, &host.run(&["create", "c1"]), "not a regular file");
}

#[test]
fn the_first_runtime_that_is_there_is_taken_and_a_link_to_ourselves_is_not_one() {
    let host = Host::new();
    fs::create_dir(host.path("front")).unwrap();
    symlink(RUNTIME, host.path("front/x-runc")).unwrap();
    symlink(host.path("real/recorder"), host.path("real/x-runc")).unwrap();
    host.configure("[runtime]\npath = [\"no-such-runtime\", \"/no/such/runtime\", \"x-runc\"]\n");
    let search = std::env::join_paths([host.path("front"), host.path("real")]).unwrap();
    let output = host.command(RUNTIME).env("PATH", search).arg("state").output().unwrap();
    assert!(host.reached(), "{}", stderr(&output));
}

#[test]
fn no_runtime_at_all_names_what_was_looked_for() {
    let host = Host::new();
    host.configure("[runtime]\npath = [\"no-such-runtime\", \"/no/such/runtime\"]\n");
    let log = host.path("log.json");
    let output = host.run(&["--log", log.to_str().unwrap(), "--log-format", "json", "state", "c1"]);
    assert_refused(
        &host,
        &output,
        "looked for no-such-runtime, /no/such/runtime in PATH and /usr/local/sbin:",
    );
    assert!(stderr(&output).contains("config.toml"), "{}", stderr(&output));
    assert!(fs::read_to_string(log).unwrap().contains("no-such-runtime"));
}

#[test]
fn a_runtime_that_leads_back_to_us_is_an_error_and_no_circle() {
    let host = Host::new();
    let copy = host.path("copy/runc");
    fs::create_dir(host.path("copy")).unwrap();
    fs::copy(RUNTIME, &copy).unwrap();
    host.configure(&format!("[runtime]\npath = {copy:?}\n"));
    assert_refused(&host, &host.run(&["state", "c1"]), "leads back to oci-mps-runtime");

    let wrapper = host.path("copy/wrapper");
    program(&wrapper, &format!("#!/bin/sh\nexec {RUNTIME} \"$@\"\n"));
    host.configure(&format!("[runtime]\npath = {wrapper:?}\n"));
    assert_refused(&host, &host.run(&["create", "c1"]), "leads back to oci-mps-runtime");
}

#[test]
fn an_engine_inside_a_container_or_a_hook_of_ours_is_no_circle() {
    let host = Host::new();
    let outer = host.path("real/outer");
    program(&outer, &format!("#!/bin/sh\nOCI_MPS_CONFIG=../inner.toml {RUNTIME} state inner\necho $?\n"));
    fs::rename(host.path("config.toml"), host.path("inner.toml")).unwrap();
    host.configure(&format!("[runtime]\npath = {outer:?}\n"));
    assert_eq!(host.run(&["state", "c1"]).stdout, b"recorded state\n7\n");
}

#[test]
fn the_directory_that_our_shim_put_into_the_path_is_taken_out_again() {
    let host = Host::new();
    let search =
        std::env::join_paths([&host.path("state/bin"), Path::new("/usr/bin"), Path::new("/bin")]).unwrap();
    host.command(RUNTIME).env("PATH", search).arg("state").output().unwrap();
    let environ = String::from_utf8(host.recorded("environ")).unwrap();
    assert!(environ.split('\0').any(|entry| entry == "PATH=/usr/bin:/bin"), "{environ}");
}

#[test]
fn a_half_installation_stops_only_those_who_ask() {
    let host = Host::new();
    let alone = host.path("alone/oci-mps-runtime");
    fs::create_dir(host.path("alone")).unwrap();
    fs::copy(RUNTIME, &alone).unwrap();
    host.spec(r#"{"annotations":{"oci-mps/memory":"8GiB"}}"#);
    let output = host.command(&alone).args(["create", "c1"]).output().unwrap();
    assert_refused(&host, &output, "install oci-mps beside");
    host.spec(r#"{"annotations":{"org.opencontainers.image.authors":"cudatools@nvidia.com"}}"#);
    assert_eq!(host.command(&alone).args(["create", "c1"]).output().unwrap().status.code(), Some(7));
}

/// The real one, which this file's tests need.
fn runc() -> PathBuf {
    ["/usr/sbin/runc", "/usr/bin/runc", "/usr/local/sbin/runc", "/usr/local/bin/runc"]
        .iter()
        .map(PathBuf::from)
        .find(|path| path.exists())
        .expect("this test needs runc: install it")
}

#[test]
fn the_real_runc_says_what_it_says_alone() {
    let host = Host::new();
    host.configure(&format!("[runtime]\npath = {:?}\n", runc()));
    fs::remove_file(host.path("bundle/config.json")).unwrap();
    let root = host.path("root");
    let root = root.to_str().unwrap();
    for line in [
        &["--version"][..],
        &["features"],
        &["--root", root, "list"],
        &["--root", root, "state", "c1"],
        &["--root", root, "create", "--bundle", ".", "c1"],
        &["--root", root, "create", "--bundle", "/nonexistent", "c1"],
        &["--root", root, "create", "--help"],
        &["no-such-command"],
    ] {
        let ours = host.run(line);
        let theirs = host.command(runc()).args(line).output().unwrap();
        assert_eq!(ours.status, theirs.status, "{line:?}");
        assert_eq!(ours.stdout, theirs.stdout, "{line:?}");
        let without_time = |output| stderr(output).split_once("level=").map(|(_, rest)| rest.to_owned());
        assert_eq!(without_time(&ours), without_time(&theirs), "{line:?}");
    }
}
