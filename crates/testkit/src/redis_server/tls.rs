//! Certificates for a server that speaks TLS, made anew for each.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
};

/// A server's certificate, and the authority that vouches for it and for nobody else.
pub(super) struct Certificate {
    /// The authority's certificate: what a client has to trust.
    pub(super) authority: String,
    authority_file: PathBuf,
    cert_file: PathBuf,
    key_file: PathBuf,
}

/// Makes an authority and a certificate for loopback, and writes what the server needs into `dir`.
pub(super) fn make(dir: &Path) -> Certificate {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "the authority of one test");
    params.key_usages.push(KeyUsagePurpose::KeyCertSign);
    let key = KeyPair::generate().expect("random numbers");
    let authority = CertifiedIssuer::self_signed(params, key).expect("a key that signs");

    let key = KeyPair::generate().expect("random numbers");
    let certificate = CertificateParams::new(names)
        .and_then(|params| params.signed_by(&key, &authority))
        .expect("names that a certificate can hold");
    let write = |name: &str, pem: &str| {
        let file = dir.join(name);
        fs::write(&file, pem).expect("a writable directory");
        file
    };
    Certificate {
        authority_file: write("authority.crt", &authority.pem()),
        cert_file: write("server.crt", &certificate.pem()),
        key_file: write("server.key", &key.serialize_pem()),
        authority: authority.pem(),
    }
}

impl Certificate {
    /// The options of a server that listens for TLS on `port`, and for nothing else on TCP.
    pub(super) fn args(&self, port: u16) -> Vec<String> {
        let file = |path: &Path| path.display().to_string();
        let (certificate, key) = (file(&self.cert_file), file(&self.key_file));
        let (port, authority) = (port.to_string(), file(&self.authority_file));
        let listen = ["--port", "0", "--tls-port", &port, "--tls-auth-clients", "no"];
        let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key];
        let trust = ["--tls-ca-cert-file", authority.as_str()];
        listen.into_iter().chain(files).chain(trust).map(str::to_owned).collect()
    }
}
