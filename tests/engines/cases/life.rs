//! A bundle's container, step by step.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::container::Container;
use crate::engine::{Bundles, Session};

/// A container that the test takes through its life itself.
pub(super) struct Life<'a> {
    pub(super) session: &'a Session,
    pub(super) id: String,
    pub(super) bundle: PathBuf,
}

impl<'a> Life<'a> {
    pub(super) fn new(session: &'a Session, id: &str, container: &Container) -> Self {
        let bundle = Bundles::write(&session.host, id, container).unwrap();
        Self { session, id: id.to_owned(), bundle }
    }

    pub(super) fn spec(&self) -> PathBuf {
        self.bundle.join("config.json")
    }

    pub(super) fn runtime(&self, arguments: &[&str]) -> Command {
        let mut command = Bundles::runtime(&self.session.host);
        command.args(arguments);
        command
    }

    pub(super) fn create(&self) -> Output {
        self.create_with(|_| {})
    }

    pub(super) fn create_with(&self, change: impl FnOnce(&mut Command)) -> Output {
        let log = self.session.host.path().join("create.log");
        let output = fs::File::create(&log).unwrap();
        let mut command = self.runtime(&["create", "--bundle"]);
        command.arg(&self.bundle).arg(&self.id).stdin(Stdio::null());
        // the container's own process keeps them open
        command.stdout(output.try_clone().unwrap()).stderr(output);
        change(&mut command);
        let status = command.status().unwrap();
        Output { status, stdout: Vec::new(), stderr: fs::read(log).unwrap() }
    }

    pub(super) fn call(&self, arguments: &[&str]) {
        let output = self.runtime(arguments).arg(&self.id).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    pub(super) fn state(&self) -> Value {
        let output = self.runtime(&["state", &self.id]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Life<'_> {
    fn drop(&mut self) {
        let _ = self.runtime(&["delete", "--force", &self.id]).output();
        let _ = fs::remove_dir_all(&self.bundle);
    }
}
