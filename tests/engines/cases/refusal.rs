//! Refusals: each names what is asked for and the way out, where its user reads it, and leaves nothing behind.

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize;

use super::{Case, On, Verdict};
use crate::container::Container;
use crate::engine::Session;
use crate::host::{GPUS, Settings};

/// Every refusal; what the fields mean stands there.
const REFUSALS: &str = include_str!("refusals.toml");

/// The engines that differ in how they show a message: every refusal is tried on each of them, on the others those
/// that are marked so.
const SHOWN_ON: &[&str] = &["runc", "podman-precreate", "podman-runtime", "ctr", "nerdctl-runtime"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusals {
    refusal: Vec<Refusal>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusal {
    name: String,
    #[serde(default)]
    everywhere: bool,
    asks: BTreeMap<String, String>,
    #[serde(default)]
    config: String,
    #[serde(default)]
    env: Vec<String>,
    sysctl: Option<(String, String)>,
    mount: Option<String>,
    #[serde(default)]
    joins_ipc: bool,
    says: String,
    way_out: String,
}

pub(super) fn cases() -> Vec<Case> {
    let refusals: Refusals =
        toml::from_str(REFUSALS).unwrap_or_else(|error| panic!("refusals.toml: {error}"));
    let case = |refusal: Refusal| Case {
        name: format!("refuses::{}", refusal.name),
        on: if refusal.everywhere { On::Every } else { On::Only(SHOWN_ON) },
        check: Box::new(move |session| check(session, &refusal)),
    };
    refusals.refusal.into_iter().map(case).collect()
}

impl Refusal {
    fn container(&self, session: &Session) -> Container {
        let mut container = Container::probe();
        container.annotations = self.asks.clone().into_iter().collect();
        container.env.clone_from(&self.env);
        container.sysctl.clone_from(&self.sysctl);
        container.ipc_of = self.joins_ipc.then(|| "/proc/1/ns/ipc".into());
        match &self.mount {
            Some(destination) => container.mount(&session.host.path().join("programs"), destination),
            None => container,
        }
    }
}

fn check(session: &mut Session, refusal: &Refusal) -> Verdict {
    let container = refusal.container(session);
    if let Some(reason) = session.engine.cannot(&container) {
        return Verdict::Skipped(reason.to_owned());
    }
    session.host.configure(&Settings { more: &refusal.config, ..Settings::default() });
    assert_refused(session, &container, &refusal.says, &refusal.way_out);
    assert!(session.host.daemon().is_none(), "refused, and yet a daemon was started for it");
    Verdict::Shown
}

/// Runs it, and shows that it was refused with these words and that nothing came of it.
pub(super) fn assert_refused(session: &mut Session, container: &Container, says: &str, way_out: &str) {
    let shares = session.host.records();
    let outcome = session.run(container);
    assert!(!outcome.status.success(), "it was not refused: {outcome}");
    let told = session.told(&outcome).replace('\\', "");
    for words in ["oci-mps: ", says, way_out] {
        assert!(told.contains(words), "{words:?} is not in what the user was told:\n{told}\n{outcome}");
    }
    assert!(
        outcome.config.is_none(),
        "refused, and yet the low-level runtime was asked to create it: {outcome}"
    );
    assert_eq!(session.host.records(), shares, "refused, and yet there is a record");
    let bundle = session.host.path().join("bundles").join(session.last_id()).join("config.json");
    if let Ok(spec) = fs::read_to_string(bundle) {
        assert!(
            !spec.contains(GPUS[0]) && !spec.contains("createRuntime"),
            "refused, and yet written: {spec}"
        );
    }
}
