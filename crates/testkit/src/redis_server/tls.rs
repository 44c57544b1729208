//! Certificates for a server that speaks TLS, made anew for each.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{CertifiedKey, generate_simple_self_signed};

/// A self-signed certificate, which a client trusts as if it were its own authority.
pub(super) struct Certificate {
    pub(super) pem: String,
    cert_file: PathBuf,
    key_file: PathBuf,
}

/// Makes a certificate for loopback and writes it, with its key, into `dir`.
pub(super) fn make(dir: &Path) -> Certificate {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(names).expect("names that a certificate can hold");
    let (cert_file, key_file) = (dir.join("server.crt"), dir.join("server.key"));
    fs::write(&cert_file, cert.pem()).expect("a writable directory");
    fs::write(&key_file, signing_key.serialize_pem()).expect("a writable directory");
    Certificate { pem: cert.pem(), cert_file, key_file }
}

impl Certificate {
    /// The options of a server that listens for TLS on `port`, and for nothing else on TCP.
    pub(super) fn args(&self, port: u16) -> Vec<String> {
        let (port, key) = (port.to_string(), self.key_file.display().to_string());
        let certificate = self.cert_file.display().to_string();
        let listen = ["--port", "0", "--tls-port", &port, "--tls-auth-clients", "no"];
        let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key];
        let trust = ["--tls-ca-cert-file", certificate.as_str()];
        listen.into_iter().chain(files).chain(trust).map(str::to_owned).collect()
    }
}
