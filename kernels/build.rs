//! Compiles the `.cu` files next to their operations: to PTX with nvcc for the feature `cuda`, as C++ for the feature `simt`.
#![cfg_attr(
    feature = "cuda",
    expect(clippy::disallowed_methods, reason = "a build script reads its environment and lists sources")
)]

fn main() {
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "simt")]
    emulated();
    #[cfg(feature = "cuda")]
    ptx();
}

/// The kernels as C++ against the emulator in `tests/simt`.
#[cfg(feature = "simt")]
fn emulated() {
    println!("cargo:rerun-if-changed=tests/simt");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .includes(["tests/simt", "src/cuda", "src"])
        .file("tests/simt/kernels.cpp")
        .compile("deepspec_simt");
}

/// One PTX file per `.cu`, for the oldest cards supported; the driver compiles it for the card it finds.
#[cfg(feature = "cuda")]
fn ptx() {
    use std::path::PathBuf;
    use std::process::Command;
    use std::{env, fs};

    for name in ["NVCC", "CUDA_HOME", "CUDA_COMPUTE_CAP"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let nvcc = env::var("NVCC")
        .or_else(|_| env::var("CUDA_HOME").map(|home| format!("{home}/bin/nvcc")))
        .unwrap_or_else(|_| "nvcc".into());
    let arch = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| "80".into());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut folders = vec![PathBuf::from("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("sources can be read") {
            let path = entry.expect("sources can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "cu") {
                let ptx = out.join(path.file_name().expect("a file has a name")).with_extension("ptx");
                let status = Command::new(&nvcc)
                    .args(["-ptx", "-O3", "-std=c++17", "-Isrc/cuda", &format!("-arch=compute_{arch}"), "-o"])
                    .arg(&ptx)
                    .arg(&path)
                    .status()
                    .unwrap_or_else(|error| panic!("cannot run `{nvcc}`: {error}; set NVCC or CUDA_HOME"));
                assert!(status.success(), "`{nvcc}` failed on {}", path.display());
            }
        }
    }
}
