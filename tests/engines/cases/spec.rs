//! The spec that the low-level runtime is given, against the one that the engine wrote.

use serde_json::{Value, json};

use super::Case;
use crate::container::{Container, QUARTER};
use crate::engine::Session;

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::every("everything_else_in_the_spec_is_as_the_engine_wrote_it", everything_else),
        Case::only(
            &["podman-precreate", "podman-rootless", "nerdctl-runtime"],
            "ipc_is_written_as_by_the_engines_own_option",
            as_the_engine,
        ),
    ]
}

fn everything_else(session: &mut Session) {
    let plain = session.run(&Container::shell("true"));
    let given = session.run(&Container::shell("true").with(&QUARTER));
    assert!(plain.status.success() && given.status.success(), "{plain}\n{given}");
    let (mut plain, mut given) = (impersonal(plain.config()), impersonal(given.config()));
    for spec in [&mut plain, &mut given] {
        take_promised(spec);
    }
    let [plain, given] = [plain, given].map(|spec| serde_json::to_string_pretty(&spec).unwrap());
    let difference = similar::TextDiff::from_lines(&plain, &given).unified_diff().to_string();
    assert!(difference.is_empty(), "without and with annotations:\n{difference}");
}

/// Takes out of a spec all that an edit may touch. Podman's variables and mounts come in any order.
fn take_promised(spec: &mut Value) {
    let retain = |list: &mut Value, keep: &dyn Fn(&Value) -> bool| {
        if let Some(list) = list.as_array_mut() {
            list.retain(keep);
        }
    };
    retain(&mut spec["process"]["env"], &|variable| {
        !variable.as_str().is_some_and(|text| text.starts_with("CUDA_"))
    });
    retain(&mut spec["mounts"], &|mount| {
        !["/dev/shm", "/dev/mqueue", "/run/oci-mps"].iter().any(|path| mount["destination"] == *path)
    });
    retain(&mut spec["linux"]["namespaces"], &|namespace| namespace["type"] != "ipc");
    for list in ["/process/env", "/mounts"] {
        spec.pointer_mut(list)
            .and_then(Value::as_array_mut)
            .expect("every engine writes it")
            .sort_by_key(Value::to_string);
    }
    for stage in ["createRuntime", "poststop"] {
        retain(&mut spec["hooks"][stage], &|hook| !is_ours(hook));
    }
    if let Some(annotations) = spec["annotations"].as_object_mut() {
        annotations.retain(|key, _| !key.starts_with("oci-mps/"));
    }
    // what is not there is the same as what is empty
    let is_nothing = |value: &Value| value.is_null() || *value == json!([]) || *value == json!({});
    if let Some(hooks) = spec["hooks"].as_object_mut() {
        hooks.retain(|_, hooks| !is_nothing(hooks));
    }
    if let Some(spec) = spec.as_object_mut() {
        spec.retain(|key, value| !(["hooks", "annotations"].contains(&key.as_str()) && is_nothing(value)));
    }
}

pub(super) fn is_ours(hook: &Value) -> bool {
    hook["args"][0] == "oci-mps"
}

/// The spec without what tells one container of an engine from the next: long hexadecimal ids, numbers and times.
fn impersonal(spec: &Value) -> Value {
    match spec {
        Value::String(text) => {
            let words = text.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
            Value::String(words.map(impersonal_word).collect())
        }
        Value::Array(items) => items.iter().map(impersonal).collect(),
        Value::Object(fields) => {
            Value::Object(fields.iter().map(|(key, value)| (key.clone(), impersonal(value))).collect())
        }
        other => other.clone(),
    }
}

fn impersonal_word(word: &str) -> &str {
    let bare = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
    let is_id = bare.len() >= 12 && bare.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_number =
        !bare.is_empty() && bare.bytes().all(|byte| byte.is_ascii_digit() || b"TZ".contains(&byte));
    if is_id || is_number { "#" } else { word }
}

/// What is ours is what the engine writes for its own `--ipc=host`.
fn as_the_engine(session: &mut Session) {
    let theirs = session.run(&Container { ipc_host: true, ..Container::shell("true") });
    let ours = session.run(&Container::shell("true").with(&QUARTER));
    let (theirs, ours) = (theirs.config(), ours.config());
    assert_eq!(ours["linux"]["namespaces"], theirs["linux"]["namespaces"]);
    for path in ["/dev/shm", "/dev/mqueue"] {
        assert_eq!(mount_at(ours, path), mount_at(theirs, path));
    }
    assert_eq!(mount_at(ours, "/dev/shm").map(|mount| &mount["source"]), Some(&json!("/dev/shm")));
}

fn mount_at<'a>(spec: &'a Value, destination: &str) -> Option<&'a Value> {
    spec["mounts"].as_array()?.iter().find(|mount| mount["destination"] == destination)
}
