//! The command line, as somebody at a terminal or in a script meets it. No daemon, no GPU: a described inventory.

use std::fs;
use std::path::PathBuf;

use assert_cmd::Command;
use serde_json::{Value, json};
use tempfile::TempDir;

struct Host {
    directory: TempDir,
}

impl Host {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let inventory = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples/gpus.toml");
        let config = format!(
            "[inventory]\nsource = \"file\"\nfile = \"{inventory}\"\n[daemon]\ncontrol = \"/nonexistent\"\n"
        );
        fs::write(directory.path().join("config.toml"), config).unwrap();
        Self { directory }
    }

    fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    fn oci_mps(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oci-mps"));
        command
            .env("OCI_MPS_STATE_DIR", self.state())
            .env("OCI_MPS_CONFIG", self.directory.path().join("config.toml"))
            .current_dir(self.directory.path())
            .args(arguments);
        command
    }

    /// What it printed; it must have succeeded.
    fn says(&self, arguments: &[&str]) -> String {
        let output = self.oci_mps(arguments).assert().success().get_output().stdout.clone();
        String::from_utf8(output).unwrap()
    }

    /// What it complained about; it must have failed with that status.
    fn complains(&self, arguments: &[&str], status: i32) -> String {
        let output = self.oci_mps(arguments).assert().code(status).get_output().stderr.clone();
        String::from_utf8(output).unwrap()
    }

    fn bundle(&self, annotations: &Value) {
        let spec = json!({"ociVersion": "1.0.2", "process": {"env": ["A=1"]}, "annotations": annotations,
                          "linux": {"namespaces": [{"type": "ipc"}]}});
        fs::create_dir_all(self.directory.path().join("bundle")).unwrap();
        fs::write(self.directory.path().join("bundle/config.json"), spec.to_string()).unwrap();
    }
}

#[test]
fn explain_shows_the_share_and_a_diff_and_changes_nothing() {
    let host = Host::new();
    host.bundle(&json!({"oci-mps/memory": "8GiB", "oci-mps/threads": "25", "oci-mps/processes": "2"}));
    let file = host.directory.path().join("bundle/config.json");
    let before = fs::read(&file).unwrap();
    for path in ["bundle", "bundle/config.json"] {
        let shown = host.says(&["explain", path]);
        for line in [
            "  on GPU 0 (NVIDIA H200 (simulated)), GPU-00000000-1111-2222-3333-444444444444",
            "    memory   8,192 MiB, 4,096 MiB for each of 2 processes; a CUDA context takes about 158 MiB of it",
            "    threads  25%, which is 32 of 132 SMs",
            "+      \"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M\",",
            "-        \"type\": \"ipc\"",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}\nis not in\n{shown}");
        }
    }
    assert_eq!(fs::read(&file).unwrap(), before);
    assert!(!host.state().exists(), "nothing is made on the host");
}

#[test]
fn explain_as_json_has_what_the_documentation_lists() {
    let host = Host::new();
    host.bundle(&json!({"nvidia.com/gpumem": "4096"}));
    let shown: Value = serde_json::from_str(&host.says(&["explain", "--json", "bundle"])).unwrap();
    assert_eq!((&shown["asks"], &shown["changes"]), (&json!(true), &json!(true)));
    let gpu = &shown["share"]["gpus"][0];
    assert_eq!(
        (&gpu["memory_mib"], &gpu["sms"], &gpu["context_mib"]),
        (&json!(4096), &json!(132), &json!(558))
    );
    assert_eq!(shown["config"]["ociVersion"], "1.0.2");
    let documented = include_str!("../docs/config.md");
    for edit in shown["edits"].as_array().unwrap() {
        assert!(documented.contains(&format!("`{}`", edit["edit"].as_str().unwrap())), "{edit}");
    }
    host.bundle(&json!({}));
    assert_eq!(host.says(&["explain", "--json", "bundle"]), "{\"asks\":false}\n");
}

#[test]
fn explain_says_the_refusal_that_the_container_would_get() {
    let host = Host::new();
    host.bundle(&json!({"oci-mps/memory": "1.5G"}));
    let said = host.complains(&["explain", "bundle"], 1);
    assert_eq!(said, "oci-mps: oci-mps/memory: \"1.5G\" is not an amount of memory; write 1536MiB\n");
    assert!(host.complains(&["explain", "nowhere"], 1).starts_with("oci-mps: cannot read nowhere: "));
}

#[test]
fn gpus_and_shares_begin_with_what_an_operator_looks_for() {
    let host = Host::new();
    let gpus = host.says(&["gpus"]);
    assert!(gpus.starts_with("GPU  NAME "), "{gpus}");
    assert!(gpus.contains("143,771 MiB  132  9.0      48       no   GPU-00000000-1111"), "{gpus}");
    let shares = host.says(&["shares"]);
    assert!(shares.lines().nth(1).unwrap().contains("0/143,771 MiB"), "{shares}");
    let shares: Value = serde_json::from_str(&host.says(&["shares", "--json"])).unwrap();
    assert_eq!(shares["shares"], json!([]));
    assert!(!host.state().exists(), "looking makes nothing");
}

#[test]
fn status_says_what_it_sees_without_a_daemon_and_without_the_program() {
    let host = Host::new();
    let status = host.says(&["status"]);
    assert!(status.contains("does not run; the first container or 'oci-mps up' starts it"), "{status}");
    assert!(status.contains("there is no MPS control program /nonexistent here"), "{status}");
    let status: Value = serde_json::from_str(&host.says(&["status", "--json"])).unwrap();
    assert_eq!((&status["daemon"]["runs"], &status["daemon"]["answers"]), (&json!(false), &json!(false)));
}

#[test]
fn up_says_what_to_install_and_down_has_nothing_to_do() {
    let host = Host::new();
    let said = host.complains(&["up"], 1);
    assert!(
        said.contains("there is no MPS control program /nonexistent here; install the driver's package"),
        "{said}"
    );
    assert_eq!(host.says(&["down"]), "no MPS control daemon ran\n");
}

#[test]
fn what_is_no_command_is_a_matter_of_usage() {
    let host = Host::new();
    for arguments in [&["banana"][..], &["explain"], &["gpus", "--banana"], &["hook", "banana"]] {
        host.complains(arguments, 2);
    }
}
