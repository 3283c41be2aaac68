{
  pkgs,
  ...
}:
{
  default = pkgs.mkShell {
    inputsFrom = [ pkgs.egress-proxies-operator ];
    packages = with pkgs; [
      cargo
      clippy
      rustc
      rustfmt
      rust-analyzer
      cargo-deny
      deadnix
      nixfmt
      kubectl
      libvirt
      openssh
      qemu-utils
      squid
      xorriso
    ];
    RUST_SRC_PATH = pkgs.rustPlatform.rustLibSrc;
  };
}
