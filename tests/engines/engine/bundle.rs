//! Plain bundles: `oci-mps-runtime run --bundle B ID`, ending in runc or crun.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::Engine;
use super::mounts::on_pure_cgroup2;
use crate::container::Container;
use crate::host::Host;
use crate::machine::MACHINE;

/// Who makes a container of a bundle.
pub(crate) struct Bundles {
    on_cgroup2: bool,
}

pub(super) fn runc(host: &mut Host) -> Result<Box<dyn Engine>> {
    extract(host)?;
    Ok(Box::new(Bundles { on_cgroup2: false }))
}

pub(super) fn crun(host: &mut Host) -> Result<Box<dyn Engine>> {
    extract(host)?;
    host.use_crun();
    Ok(Box::new(Bundles { on_cgroup2: true }))
}

fn extract(host: &Host) -> Result<()> {
    let root = host.path().join("rootfs");
    fs::create_dir(&root)?;
    let tar = Command::new("tar").arg("-C").arg(&root).arg("-xf").arg(MACHINE.path("ROOTFS_TAR")).status()?;
    ensure!(tar.success(), "unpacking the root file system");
    // root of a user namespace may not make them there
    for mount_point in ["run/oci-mps", "shared"] {
        fs::create_dir(root.join(mount_point))?;
    }
    Ok(())
}

impl Bundles {
    /// Writes a bundle.
    pub(crate) fn write(host: &Host, id: &str, container: &Container) -> Result<PathBuf> {
        let bundle = host.path().join("bundles").join(id);
        fs::create_dir_all(&bundle)?;
        let spec = Command::new(MACHINE.path("RUNC")).arg("spec").current_dir(&bundle).output()?;
        ensure!(spec.status.success(), "runc spec: {}", String::from_utf8_lossy(&spec.stderr));
        let path = bundle.join("config.json");
        let mut spec: Value = serde_json::from_slice(&fs::read(&path)?)?;
        describe(&mut spec, host, id, container);
        fs::write(&path, serde_json::to_vec_pretty(&spec)?).context("writing config.json")?;
        Ok(bundle)
    }

    /// `oci-mps-runtime` with its global options.
    pub(crate) fn runtime(host: &Host) -> Command {
        let mut command = Command::new(host.program("oci-mps-runtime"));
        command.envs(host.variables()).arg("--root").arg(host.path().join("containers"));
        command
    }
}

/// Puts into what `runc spec` wrote what the container is to be.
fn describe(spec: &mut Value, host: &Host, id: &str, container: &Container) {
    spec["root"] = json!({"path": host.path().join("rootfs"), "readonly": false});
    spec["process"]["terminal"] = json!(false);
    spec["process"]["args"] = json!(container.command);
    let env = spec["process"]["env"].as_array_mut().expect("runc spec writes an environment");
    env.extend(container.env.iter().map(|variable| json!(variable)));
    if let Some(user) = container.user {
        spec["process"]["user"] = json!({"uid": user, "gid": user});
    }
    if !container.annotations.is_empty() {
        let annotations = container.annotations.iter().map(|(key, value)| (key.clone(), json!(value)));
        spec["annotations"] = Value::Object(annotations.collect());
    }
    let mounts = spec["mounts"].as_array_mut().expect("runc spec writes mounts");
    mounts.extend(container.mounts.iter().map(|(source, destination)| {
        json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rw"]})
    }));
    let linux = &mut spec["linux"];
    linux["cgroupsPath"] = json!(format!("/{}/{id}", host.name()));
    if let Some((name, value)) = &container.sysctl {
        linux["sysctl"] = json!({name: value});
    }
    if container.user_namespace {
        let mapping = json!([{"containerID": 0, "hostID": 100_000, "size": 65_536}]);
        linux["uidMappings"] = mapping.clone();
        linux["gidMappings"] = mapping;
    }
    let namespaces = linux["namespaces"].as_array_mut().expect("runc spec writes namespaces");
    if container.user_namespace {
        namespaces.push(json!({"type": "user"}));
    }
    namespaces.retain(|namespace| !(container.ipc_host && namespace["type"] == "ipc"));
    for namespace in namespaces.iter_mut().filter(|namespace| namespace["type"] == "ipc") {
        if let Some(path) = &container.ipc_of {
            namespace["path"] = json!(path);
        }
    }
}

impl Engine for Bundles {
    fn command(&self, host: &Host, id: &str, container: &Container) -> Result<Command> {
        let bundle = Self::write(host, id, container)?;
        if self.on_cgroup2 {
            // its device filter is BPF, which needs CAP_SYS_RESOURCE
            let path = bundle.join("config.json");
            let mut spec: Value = serde_json::from_slice(&fs::read(&path)?)?;
            spec["linux"].as_object_mut().context("linux in the spec")?.remove("resources");
            fs::write(&path, serde_json::to_vec(&spec)?)?;
        }
        let mut command = Self::runtime(host);
        if self.on_cgroup2 {
            command.arg("--cgroup-manager=disabled");
        }
        command.arg("run").arg("--bundle").arg(bundle).arg(id);
        Ok(if self.on_cgroup2 { on_pure_cgroup2(command) } else { command })
    }

    fn close(&mut self, host: &Host) {
        for entry in fs::read_dir(host.path().join("containers")).into_iter().flatten().flatten() {
            let _ = Command::new(MACHINE.path("RUNC"))
                .arg("--root")
                .arg(host.path().join("containers"))
                .args(["delete", "--force"])
                .arg(entry.file_name())
                .output();
        }
    }
}
